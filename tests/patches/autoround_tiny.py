"""Quantize a tiny Qwen4-Exp with AutoRound, in a process of its own: AutoRound patches transformers' classes in place.

usage: python autoround_tiny.py SOURCE OUT BITS_JSON
BITS_JSON: {LEAF NAME or part of a name: bits}; every other layer gets 2 bits
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen4ExpForConditionalGeneration


def main(argv: list[str]) -> int:
    source, out, bits = Path(argv[0]), Path(argv[1]), json.loads(argv[2])
    model = Qwen4ExpForConditionalGeneration.from_pretrained(source, dtype=torch.bfloat16)
    leaves = {name: name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    layer_config = {name: {"bits": bits[leaf]} for name, leaf in leaves.items() if leaf in bits}
    # The experts become layers of their own only inside AutoRound, so they are named by a part of their name.
    layer_config |= {key: {"bits": value} for key, value in bits.items() if key not in leaves.values()}
    # Round-to-nearest needs no text; AutoRound only wants a tokenizer to save beside the weights.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    AutoRound(
        model,
        tokenizer,
        scheme="W2A16",
        iters=0,
        disable_opt_rtn=True,
        group_size=32,
        layer_config=layer_config,
        device_map="cpu",
    ).quantize_and_save(str(out), format="auto_round")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
