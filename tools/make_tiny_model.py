#!/usr/bin/env python3
"""Write a random Qwen4-Exp checkpoint in the published on-disk layout. No downloads; needs torch and
transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from pathlib import Path

from q4kit import cli, exit_codes
from q4kit.errors import Q4Error, UsageError
from q4kit.tinymodel import PRESETS, Options, generate

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_in_bytes(text: str) -> int:
    """Return `text` ("4MB", "1.5GiB", "4096") in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B?)", text.strip().upper())
    if not match or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 4MB or 1GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def layer_ids(text: str) -> tuple[int, ...]:
    """Return the comma-separated one-indexed layer ids in `text`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer ids like 2,3") from error


def parser() -> argparse.ArgumentParser:
    """Return the argument parser; every override defaults to the preset's value."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("out", type=Path, help="folder to create")
    p.add_argument("--preset", choices=sorted(PRESETS), default="mini", help="sizes to start from")
    p.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    override = p.add_argument_group("overrides of the preset", "left out: the preset's value")
    for flag, field, kind, text in (
        ("--layers", "layers", int, "decoder layers, a multiple of 4"),
        ("--experts", "experts", int, "routed experts a layer"),
        ("--experts-per-token", "experts_per_token", int, "experts that a token is routed to"),
        ("--table-rows", "table_rows", int, "ngram_vocab_size_base: an n-gram table has about 16 times this"),
        ("--split-parts", "split_parts", int, "tensors an n-gram table is split into (split_ngram_parts)"),
        ("--ple-layers", "ple_layers", layer_ids, "one-indexed layers with a PLE table, like 2,3"),
        ("--vocab-size", "vocab_size", int, "rows of the token embedding; the tokenizer has 512"),
        ("--max-position-embeddings", "max_position_embeddings", int, "longest context, tokens"),
        ("--max-shard-size", "max_shard_size", size_in_bytes, "largest safetensors file"),
        ("--eos-token-id", "eos_token_id", int, "token that ends a text, and resets the n-gram context"),
        ("--mtp-layers", "mtp_layers", int, "1 adds a multi-token-prediction head, for speculative decoding"),
        ("--embedding-std", "embedding_std", float, "of the token embedding: more of it, more accepted drafts"),
        ("--seed", "seed", int, "of the weights"),
    ):
        override.add_argument(flag, dest=field, type=kind, default=argparse.SUPPRESS, help=text)
    for flag, field, choices, text in (
        ("--dtype", "dtype", ("bfloat16", "float32"), "of the weights; the values are the same"),
        ("--ple-dtype", "ple_dtype", ("model", "bfloat16", "float8_e4m3fn"), "of the n-gram tables"),
        ("--expert-layout", "expert_layout", ("per-expert", "fused"), "one tensor an expert, or one a layer"),
    ):
        override.add_argument(flag, dest=field, choices=choices, default=argparse.SUPPRESS, help=text)
    return p


def options_from(arguments: argparse.Namespace) -> Options:
    """Return the preset with the given overrides."""
    given = {k: v for k, v in vars(arguments).items() if k not in ("out", "preset", "force")}
    return dataclasses.replace(PRESETS[arguments.preset], **given)


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 written, 2 bad arguments, 4 disk or environment."""
    arguments = parser().parse_args(argv)
    started = time.monotonic()

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done / 1e9:.2f} / {total / 1e9:.2f} GB", end="", file=sys.stderr, flush=True)

    try:
        made = generate(arguments.out, options_from(arguments), force=arguments.force, progress=progress)
    except Q4Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except OSError as error:
        wrapped = UsageError(f"cannot write {arguments.out}: {error}", remedy="give a writable folder")
        print(wrapped.render(), file=sys.stderr)
        return wrapped.exit_code
    print(
        f"{made.path}: {made.parameters / 1e6:.2f} M parameters, "
        f"{made.tensors} tensors in {made.files} files, {made.nbytes / 1e9:.3f} GB, "
        f"{time.monotonic() - started:.1f} s"
    )
    return exit_codes.HOLDS


if __name__ == "__main__":
    sys.exit(cli.run(main))
