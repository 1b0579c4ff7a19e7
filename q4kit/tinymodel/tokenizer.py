"""A byte-level BPE tokenizer trained on a few generated sentences, with a ChatML template. No downloads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from q4kit.tinymodel.options import MIN_VOCAB, SPECIAL_TOKENS, VISION_TOKENS

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def corpus() -> list[str]:
    """Return the training text: pseudo-words, digits and the sentences that the tools send."""
    rng = random.Random(0)
    consonants, vowels = "bcdfghklmnprst", "aeiou"
    vocabulary = [
        "".join(rng.choice(consonants) + rng.choice(vowels) for _ in range(rng.randint(1, 3))) for _ in range(200)
    ]
    return [
        " ".join(rng.choice(vocabulary) for _ in range(4000)),
        "The quick brown fox jumps over the lazy dog. ",
        "The secret number is 12345. What is the secret number? ",
        "0 1 2 3 4 5 6 7 8 9 ",
        "hello world, this is a needle in a haystack. ",
    ] * 5


def write_tokenizer(folder: Path) -> int:
    """Write tokenizer and chat template into `folder` and return the number of tokens (512)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer_class: Any = trainers.BpeTrainer
    trainer = trainer_class(
        vocab_size=MIN_VOCAB - len(VISION_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    fast_class: Any = PreTrainedTokenizerFast
    fast = fast_class(tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[2], pad_token=SPECIAL_TOKENS[0])
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)
