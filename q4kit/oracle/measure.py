"""Measuring: sends a plan to a server and checks every answer before a number of it is kept.

The native route gives token ids with every log-probability, so alignment is proven position by
position. The OpenAI route (`/v1/completions` with echo and logprobs) gives no ids; there the number of
positions is checked, alternatives are not kept, and the decode leg is left out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q4kit import provenance
from q4kit.errors import NotComparableError, Q4Error, ServerError, UsageError
from q4kit.oracle import fit, promptset
from q4kit.oracle.plan import Item, Options, clip, make_plan
from q4kit.oracle.recording import ItemResult, Position, Recording
from q4kit.server.client import GREEDY, Client

Progress = Callable[[int, int, str], None]
"""Called as (items done, items in all, name of the item that comes next)."""

BACKENDS = ("sglang", "openai")

ROUNDING = 1e-3
"""How far above 0 a log-probability may lie through rounding, nats."""


_SHORTER = "record another reference that fits both servers (record --prompts ids, or --max-prompt-tokens)"


def _silent(done: int, total: int, name: str) -> None:
    """Report nothing."""


def tokenizer_fingerprint(client: Client) -> str:
    """Return the hash of the ids of a fixed probe text under the server's tokenizer."""
    return promptset.ids_fingerprint(client.tokenize(promptset.PROBE_TEXT))


def new_recording(
    client: Client,
    *,
    options: Options,
    source: str = "text",
    folder: Path = promptset.DEFAULT_FOLDER,
    backend: str = "sglang",
    tool: str = "logprob_diff",
) -> Recording:
    """Return an empty recording of the prompt set: ids made by the server's tokenizer, plan checked.

    Raises:
        UsageError: the options cannot be recorded, or a request does not fit into the server's context.
    """
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}", remedy=f"Use one of {', '.join(BACKENDS)}.")
    options.check()
    chosen = promptset.load(source, folder)
    block = provenance.collect(client, tool=tool)
    vocab = provenance.get(block, "model.vocab_size")
    if isinstance(vocab, int) and vocab < chosen.min_vocab:
        raise NotComparableError(
            f"prompt set {chosen.name} needs a vocabulary of {chosen.min_vocab}, the model has {vocab}"
        )
    prompts = {
        prompt.name: clip(list(prompt.ids) if prompt.ids else client.tokenize(prompt.text or ""), options)
        for prompt in chosen.prompts
    }
    items = make_plan(prompts, options)
    info = server_limits(client, backend)
    fit.check(info, items, fit.remedies(info, prompts, _fixed_ids(folder), options))
    return Recording(
        {
            "backend": backend,
            "prompt_set": {"name": chosen.name, "sha256": chosen.sha256},
            "tokenizer": tokenizer_fingerprint(client),
            "options": _options_json(options),
            "provenance": block,
        },
        prompts,
        complete=False,
        reason="not started",
    )


def like(client: Client, reference: Recording, *, tool: str = "logprob_diff") -> Recording:
    """Return an empty recording of another server over the reference's ids.

    Raises:
        NotComparableError: another tokenizer.
        UsageError: a request does not fit into the server's context.
    """
    block = provenance.collect(client, tool=tool)
    header = {**reference.header, "provenance": block, "tokenizer": tokenizer_fingerprint(client)}
    check_tokenizer(reference.header["tokenizer"], header["tokenizer"])
    # The reference's own items, not a new plan: a later version of the planner must not make them differ.
    items = [result.item for result in reference.results]
    fit.check(server_limits(client, header["backend"]), items, [_SHORTER])
    return Recording(header, reference.prompts, complete=False, reason="not started", plan=items)


def server_limits(client: Client, backend: str) -> dict[str, Any]:
    """Return /server_info; nothing from a server that has only the OpenAI route."""
    with contextlib.suppress(*([ServerError] if backend == "openai" else [])):
        return client.server_info()
    return {}


def _fixed_ids(folder: Path) -> dict[str, list[int]]:
    """Return the prompts of `--prompts ids`; none where the folder has none that can be used."""
    with contextlib.suppress(Q4Error):
        return {prompt.name: list(prompt.ids or ()) for prompt in promptset.load("ids", folder).prompts}
    return {}


def check_tokenizer(reference: str, candidate: str) -> None:
    """Raise `NotComparableError` when two tokenizer fingerprints differ."""
    if reference != candidate:
        raise NotComparableError(
            f"different tokenizer: fingerprint {candidate}, the reference was recorded with {reference}",
            remedy="Token ids mean other text there: compare models that share a tokenizer.",
        )


def run(client: Client, recording: Recording, *, progress: Progress = _silent) -> None:
    """Measure the recording's plan into it.

    On any fault, and on Ctrl-C, what was measured so far stays in the recording, which stays marked as
    not complete with the reason; the exception goes on to the caller.
    """
    items = recording.plan or make_plan(recording.prompts, recording.options)
    vocab = provenance.get(recording.provenance, "model.vocab_size")
    asker = _Native(client, recording.options.top, vocab if isinstance(vocab, int) else None)
    backend = recording.header["backend"]
    if backend == "openai":
        items = [item for item in items if item.leg == "prefill"]
    try:
        for done, item in enumerate(items):
            progress(done, len(items), item.name)
            ids = recording.prompts[item.prompt][: item.length]
            if backend == "openai":
                result = _openai_prefill(client, item, ids)
            elif item.leg == "prefill":
                result = asker.prefill(item, ids)
            else:
                result = asker.decode(item, ids)
            recording.results.append(result)
        progress(len(items), len(items), "done")
    except KeyboardInterrupt:
        recording.reason = "interrupted"
        raise
    except Q4Error as error:
        recording.reason = str(error)
        raise
    recording.complete, recording.reason = True, ""


# -- one item, native route ---------------------------------------------------------------------


def _score_request(ids: Sequence[int], first: int, top: int, new_tokens: int) -> dict[str, Any]:
    """Return a /generate payload whose logprobs begin at position `first` of `ids`."""
    return {
        "input_ids": list(ids),
        "sampling_params": {**GREEDY, "max_new_tokens": new_tokens},
        "return_logprob": True,
        # The server returns None for the position it starts at, so start one earlier.
        "logprob_start_len": first - 1,
        "top_logprobs_num": top,
        "return_text_in_logprobs": False,
    }


@dataclass(frozen=True, slots=True)
class _Native:
    """Asks the native route for one item at a time."""

    client: Client
    top: int
    vocab: int | None
    """Vocabulary size, where known."""

    def ask(self, item: Item, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return meta_info of one uncached answer."""
        self.client.flush_cache()
        meta: dict[str, Any] = self.client.generate(payload)["meta_info"]
        sent = len(payload["input_ids"])
        if meta.get("prompt_tokens") != sent:
            raise ServerError(
                f"{item.name}: the server counted {meta.get('prompt_tokens')} prompt tokens, {sent} were sent"
            )
        if meta.get("cached_tokens") is None:
            raise ServerError(
                f"{item.name}: the answer has no count of cached tokens, expected 0",
                remedy="The native route of the pinned SGLang gives it; for another server use --backend openai.",
            )
        if meta["cached_tokens"] != 0:
            raise NotComparableError(
                f"{item.name}: {meta.get('cached_tokens')} prompt tokens came from the prefix cache, expected 0",
                remedy="Another client uses this server; a cached prefix is another computation. Use it alone.",
            )
        return meta

    def forced(self, item: Item, ids: Sequence[int], first: int) -> tuple[list[Position], int]:
        """Return the teacher-forced positions `first ..` of `ids`, and the cached token count."""
        meta = self.ask(item, _score_request(ids, first, self.top, 1))
        entries = meta.get("input_token_logprobs") or []
        tops = meta.get("input_top_logprobs") or []
        expected = len(ids) - first + 1
        if len(entries) != expected or len(tops) != expected:
            raise ServerError(
                f"{item.name}: {len(entries)} logprobs and {len(tops)} top lists for {expected} positions",
                remedy="Positions cannot be aligned; is this the pinned SGLang?",
            )
        positions = []
        for pos, entry, top in zip(range(first, len(ids)), entries[1:], tops[1:], strict=True):
            found = entry[1]
            if found == 0 and self.vocab is not None and ids[pos] == self.vocab - 1:
                # SGLang 0.5.23 labels the last id of the vocabulary 0 (logprob_result_processor compares
                # with vocab_size - 1); the value beside the label is the right one.
                found = ids[pos]
            positions.append(checked_position(pos, ids[pos], (entry[0], found), top, item.name))
        return positions, meta["cached_tokens"]

    def prefill(self, item: Item, ids: Sequence[int]) -> ItemResult:
        """Return a prefill item: the last positions of a prompt, teacher-forced."""
        positions, cached = self.forced(item, ids, item.first)
        return ItemResult(item, positions, cached)

    def decode(self, item: Item, ids: Sequence[int]) -> ItemResult:
        """Return a decode item: a greedy segment, and the same tokens teacher-forced."""
        meta = self.ask(item, _score_request(ids, len(ids), self.top, item.generate))
        entries, tops = meta.get("output_token_logprobs") or [], meta.get("output_top_logprobs") or []
        if not entries:
            raise ServerError(f"{item.name}: empty answer", remedy="Read the server's log.")
        if len(entries) != item.generate or len(tops) != item.generate:
            raise ServerError(
                f"{item.name}: {len(entries)} tokens and {len(tops)} top lists, {item.generate} were asked "
                f"for (finish reason {meta.get('finish_reason')!r})",
                remedy="Generation ended early although ignore_eos was set; read the server's log.",
            )
        positions = [
            checked_position(len(ids) + offset, None, entry, alternatives, item.name)
            for offset, (entry, alternatives) in enumerate(zip(entries, tops, strict=True))
        ]
        whole = [*ids, *(position.token for position in positions)]
        forced, _ = self.forced(item, whole, len(ids))
        for position, repeated in zip(positions, forced, strict=True):
            position.again = repeated.logprob
        return ItemResult(item, positions, meta["cached_tokens"])


def checked_position(pos: int, token: int | None, entry: Any, top: Any, name: str) -> Position:
    """Return one position after proving that it is the expected token with finite values.

    Args:
        pos: index in the sequence.
        token: the token that must be there; None for a generated one.
        entry: (logprob, id) as the server sent it.
        top: the server's list of (logprob, id, text).
        name: item, for messages.

    Raises:
        ServerError: another token, a value that is not a finite log-probability, a duplicate id.
    """
    logprob, found = entry[0], entry[1]
    if token is not None and found != token:
        raise ServerError(f"{name}: misaligned at position {pos}: token {found}, expected {token}")
    pairs = [(int(pair[1]), pair[0]) for pair in top or ()]
    for where, value in [("logprob", logprob), *(("top logprob", value) for _, value in pairs)]:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ServerError(
                f"{name}: {where} {value!r} at position {pos} is not finite",
                remedy="The model produced NaN or infinite logits; no number of this server can be used.",
            )
        if value > ROUNDING:
            raise ServerError(f"{name}: {where} {value!r} at position {pos} is above 0: not a log-probability")
    if len({identity for identity, _ in pairs}) != len(pairs):
        raise ServerError(f"{name}: duplicate ids in the top list at position {pos}")
    return Position(pos, int(found), float(logprob), [(identity, float(value)) for identity, value in pairs])


# -- one item, OpenAI route ---------------------------------------------------------------------


def _openai_prefill(client: Client, item: Item, ids: Sequence[int]) -> ItemResult:
    """Return teacher-forced logprobs through `echo`; ids cannot be proven, only counted.

    A server need not report cached tokens there: the count is then None, and every report of the recording says so.
    """
    payload = {
        "model": client.models()[0],
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "top_p": 1.0,
        "n": 1,
        "seed": 0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "echo": True,
        "logprobs": 1,
    }
    answer = client.openai("/v1/completions", payload)
    logprobs = (answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or []
    if len(logprobs) not in (len(ids), len(ids) + 1):
        raise ServerError(
            f"{item.name}: {len(logprobs)} echoed logprobs for {len(ids)} prompt tokens and 1 new one",
            remedy="The server must offer echo with logprobs on /v1/completions.",
        )
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    if cached is not None and cached != 0:
        raise NotComparableError(
            f"{item.name}: {cached} prompt tokens came from the prefix cache, expected 0",
            remedy="Start the server without a prefix cache.",
        )
    positions = [
        checked_position(pos, ids[pos], (logprobs[pos], ids[pos]), (), item.name)
        for pos in range(item.first, item.length)
    ]
    return ItemResult(item, positions, cached)


def _options_json(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in Options.__dataclass_fields__}
