"""The fixed prompt set: texts with hashes in a manifest, and a set of ids for any vocabulary >= 512.

A folder holds `manifest.json` and the files it names. Every file is checked against its sha256 when it
is read, so a changed prompt is an error and never a silent new baseline. The token ids of the texts
depend on the tokenizer, so they are made by the server when a reference is recorded and stored in it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q4kit.errors import NotComparableError, UsageError
from q4kit.report import dump_json, write_atomic

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "data" / "prompts"
MANIFEST = "manifest.json"
SCHEMA = 1

WORDS_SEED = 20260902
IDS_SEED = 20260903
IDS_LOW, IDS_HIGH = 64, 448
"""Half-open range of the `ids` set: above the control tokens and below the special tokens of the small
tokenizers used in tests, and ordinary byte-pair tokens in every published Qwen vocabulary."""

PROBE_TEXT = "Grüße, naïve 北京 🧭\n\t0x7f != 3.14159e-02; def f(x): return x[::-1]  # ¿qué?"
"""Text whose ids fingerprint a tokenizer: accents, CJK, an emoji, digits, code, runs of white space."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text to be tokenized, or fixed ids."""

    name: str
    text: str | None
    ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts in recording order, with the hash that names them."""

    name: str
    sha256: str
    prompts: tuple[Prompt, ...]
    min_vocab: int
    """Smallest vocabulary with which the set can be used (0 for texts)."""


def ids_fingerprint(ids: Sequence[int]) -> str:
    """Return a short hash of a list of token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def random_words(seed: int = WORDS_SEED, count: int = 420) -> str:
    """Return `count` distinct pronounceable words that no corpus contains, ten a line.

    Nothing in them can be predicted from meaning and no n-gram repeats, so every position reads fresh
    rows of an n-gram embedding table.
    """
    draw = random.Random(seed)
    onsets = (
        "b",
        "br",
        "c",
        "ch",
        "d",
        "dr",
        "f",
        "fl",
        "g",
        "gr",
        "h",
        "j",
        "k",
        "kl",
        "l",
        "m",
        "n",
        "p",
        "pl",
        "qu",
        "r",
        "s",
        "sk",
        "st",
        "t",
        "tr",
        "v",
        "w",
        "z",
    )
    vowels = ("a", "e", "i", "o", "u", "ai", "ei", "ou", "y")
    codas = ("b", "d", "f", "g", "k", "l", "m", "n", "nd", "p", "r", "rk", "s", "st", "t", "x", "z")
    words: dict[str, None] = {}
    while len(words) < count:
        syllables = [
            draw.choice(onsets) + draw.choice(vowels) + (draw.choice(codas) if draw.random() < 0.6 else "")
            for _ in range(draw.choice((2, 2, 3, 3, 4)))
        ]
        words["".join(syllables)] = None
    ordered = list(words)
    return "\n".join(" ".join(ordered[start : start + 10]) for start in range(0, count, 10)) + "\n"


def random_ids(seed: int = IDS_SEED, lengths: Sequence[int] = (700, 700, 700, 700, 700, 3500)) -> list[list[int]]:
    """Return seeded lists of ids, uniform over [IDS_LOW, IDS_HIGH); about 7,000 in all."""
    draw = random.Random(seed)
    return [[draw.randrange(IDS_LOW, IDS_HIGH) for _ in range(length)] for length in lengths]


def write_manifest(folder: Path, *, name: str, texts: Sequence[str], long: Sequence[str]) -> dict[str, Any]:
    """Write `manifest.json` over the text files `<text>.txt` and `ids.json`; return the manifest.

    Args:
        folder: where the files lie.
        name: name and version of the set; a changed text needs a new one.
        texts: file stems, one prompt each.
        long: stems concatenated, in this order, into the prompt "long".
    """
    files = {stem: f"{stem}.txt" for stem in texts}
    manifest = {
        "schema": SCHEMA,
        "name": name,
        "licence": "Apache-2.0; the texts were written for this repository, words and ids are generated",
        "files": {
            stem: {"file": file, "sha256": hashlib.sha256((folder / file).read_bytes()).hexdigest()}
            for stem, file in files.items()
        },
        "prompts": [*({"name": stem, "parts": [stem]} for stem in texts), {"name": "long", "parts": [*long]}],
        "ids": {
            "file": "ids.json",
            "sha256": hashlib.sha256((folder / "ids.json").read_bytes()).hexdigest(),
            "min_vocab": IDS_HIGH,
            "seed": IDS_SEED,
        },
    }
    write_atomic(folder / MANIFEST, dump_json(manifest).encode())
    return manifest


def load(source: str = "text", folder: Path = DEFAULT_FOLDER) -> PromptSet:
    """Return the prompt set, every file checked against the manifest.

    Args:
        source: "text" for the texts, "ids" for the fixed token ids.
        folder: a folder with a manifest.

    Raises:
        UsageError: no manifest there, or an unknown source.
        NotComparableError: a file is missing or its hash is not the manifest's.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path}: no prompt set there ({error.strerror})",
            remedy="Run from a checkout of the repository, or name the folder with --prompts.",
        ) from error
    if manifest.get("schema") != SCHEMA:
        raise UsageError(f"{path}: schema {manifest.get('schema')!r}, expected {SCHEMA}")
    if source == "text":
        texts = {stem: _checked(folder, entry).decode("utf-8") for stem, entry in manifest["files"].items()}
        prompts = tuple(
            Prompt(entry["name"], "\n".join(texts[part] for part in entry["parts"]), None)
            for entry in manifest["prompts"]
        )
        content: list[list[Any]] = [[prompt.name, prompt.text] for prompt in prompts]
        min_vocab = 0
    elif source == "ids":
        lists = json.loads(_checked(folder, manifest["ids"]))
        prompts = tuple(Prompt(f"ids{index}", None, tuple(ids)) for index, ids in enumerate(lists))
        content = [[prompt.name, list(prompt.ids or ())] for prompt in prompts]
        min_vocab = int(manifest["ids"]["min_vocab"])
    else:
        raise UsageError(f"unknown prompt source {source!r}", remedy='Use "text" or "ids".')
    digest = hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()
    return PromptSet(f"{manifest['name']}/{source}", digest, prompts, min_vocab)


def _checked(folder: Path, entry: dict[str, Any]) -> bytes:
    path = folder / str(entry["file"])
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotComparableError(f"{path}: named by the manifest but missing") from error
    found = hashlib.sha256(content).hexdigest()
    if found != entry["sha256"]:
        raise NotComparableError(
            f"{path}: the prompt set was changed (sha256 {found[:16]}, manifest says {entry['sha256'][:16]})",
            remedy="Restore the file; a new text needs a new set name, and references recorded anew.",
        )
    return content
