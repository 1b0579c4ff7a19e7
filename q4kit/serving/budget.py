"""How much GPU memory and host RAM a configuration takes. Pure arithmetic; every part names its formula.

What is computed from shapes is checked: weights, experts and table against checkpoint headers
(tests/unit/serving/test_budget.py), caches against a running server's report (tests/server/test_serve_budget.py). Two
parts are estimates and marked so: `GPU reserve` is what SGLang itself sets aside for activations and graphs,
`server processes` is what the Python processes take.

Experts in host RAM are pinned at their own size: paged ones by patch 0010, offloaded ones by patch 0020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from q4kit.errors import UsageError
from q4kit.serving.shape import DTYPE_BYTES, Shape

GIB = 2**30
PAGE_BYTES = 4096
Place = Literal["vram", "ram", "disk"]
Table = Literal["nvme", "pinned", "gpu"]
SLOTS_PER_REQUEST = 8
"""GDN state slots a request: SGLang needs up to 5 (3, and the tracking slots of the radix cache); the rest caches
prefixes."""
PROCESS_BYTES = 5 * GIB
"""Estimate, not measured on a 24 GB machine: CUDA host context, torch, tokenizer, scheduler and detokenizer."""


@dataclass(frozen=True)
class ExpertFormat:
    """How a routed expert's weights are stored."""

    name: str
    bytes_a_weight: tuple[float, ...]
    """Of each tensor that a matrix is stored as: the values, then scales and zeros."""
    what: str
    served: bool
    """Whether SGLang 0.5.23 with the series has a kernel and a loader for it."""


FORMATS: Mapping[str, ExpertFormat] = {
    f.name: f
    for f in (
        ExpertFormat("bf16", (2,), "2 bytes", True),
        ExpertFormat("fp8", (1, 4 / 128**2), "1 byte, one fp32 scale for 128 x 128", True),
        ExpertFormat("nvfp4", (1 / 2, 1 / 16), "4 bits, one fp8 scale for 16", True),
        ExpertFormat("int4", (1 / 2, 2 / 128), "4 bits symmetric, one 16-bit scale for 128", True),
        ExpertFormat("int2", (1 / 4, 2 / 128, 1 / 4 / 128), "2 bits, a 16-bit scale and a zero for 128", False),
    )
}


@dataclass(frozen=True)
class Settings:
    """What is chosen when a server is started."""

    context: int = 32768
    """Longest prompt plus answer, tokens."""
    max_requests: int = 2
    expert_format: str = "nvfp4"
    resident_experts: int | None = None
    """Paged experts: this many a layer on the GPU, and all of them in host RAM."""
    offload_gib: int | None = None
    """--cpu-offload-gb: at least this many GiB of experts in host RAM, the rest on the GPU."""
    kv_dtype: str = "bf16"
    table: Table = "nvme"
    tokens: int | None = None
    """Tokens of the KV pool; default: context times max_requests."""
    state_slots: int | None = None
    """GDN state slots; default: SLOTS_PER_REQUEST a request."""
    chunk: int = 2048
    """Chunked prefill size, tokens."""
    page: int = 64

    @property
    def pool_tokens(self) -> int:
        """Tokens of the KV pool."""
        return self.tokens if self.tokens is not None else self.context * self.max_requests

    @property
    def slots(self) -> int:
        """GDN state slots."""
        return self.state_slots if self.state_slots is not None else self.max_requests * SLOTS_PER_REQUEST

    def check(self, shape: Shape) -> None:
        """Raise UsageError for settings that contradict each other or the model."""
        if self.expert_format not in FORMATS:
            raise UsageError(f"expert format {self.expert_format!r}", remedy=f"one of {', '.join(FORMATS)}")
        if self.kv_dtype not in KV_BYTES:
            raise UsageError(f"KV dtype {self.kv_dtype!r}", remedy=f"one of {', '.join(KV_BYTES)}")
        if self.resident_experts is not None and self.offload_gib is not None:
            raise UsageError(
                "resident experts (paged experts) and an offload in GiB exclude each other",
                remedy="give one of the two; SGLang refuses both together (patch 0006)",
            )
        if self.resident_experts is not None and not shape.top_k <= self.resident_experts <= shape.experts:
            raise UsageError(
                f"{self.resident_experts} resident experts: expected {shape.top_k} (used by a token) to {shape.experts}"
            )
        for name in ("context", "max_requests", "pool_tokens", "slots", "chunk", "page"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.offload_gib is not None and self.offload_gib < 0:
            raise UsageError(f"offload is {self.offload_gib} GiB, expected 0 or more")


KV_BYTES: Mapping[str, int] = {"bf16": 2, "fp8_e4m3": 1}


@dataclass(frozen=True)
class Item:
    """One part of the budget."""

    name: str
    place: Place
    nbytes: int
    formula: str
    estimate: bool = False


@dataclass(frozen=True)
class Budget:
    """All parts, and their sums."""

    items: tuple[Item, ...]

    def total(self, place: Place) -> int:
        """Return the bytes of all parts in `place`."""
        return sum(item.nbytes for item in self.items if item.place == place)

    def of(self, name: str) -> int:
        """Return the bytes of the part called `name` (of all its places)."""
        found = [item.nbytes for item in self.items if item.name == name]
        if not found:
            raise KeyError(name)
        return sum(found)


def expert_bytes(shape: Shape, expert_format: str) -> float:
    """Return the bytes of one routed expert."""
    return shape.expert_parameters * sum(FORMATS[expert_format].bytes_a_weight)


def routed_bytes(shape: Shape, expert_format: str) -> int:
    """Return the bytes of all routed experts."""
    return round(shape.layers * shape.experts * expert_bytes(shape, expert_format))


def layer_tensors(shape: Shape, expert_format: str) -> list[int]:
    """Return the bytes of the tensors that hold one layer's routed experts, in the order in which SGLang moves them.

    Gate and up of all experts are one tensor [E, 2 I, H], down another [E, H, I]; their scales follow.
    """
    down = shape.experts * shape.hidden * shape.expert_size
    return [round(n * down * width) for width in FORMATS[expert_format].bytes_a_weight for n in (2, 1)]


def pinned_bytes(nbytes: int) -> int:
    """Return the host RAM of a pinned tensor of `nbytes` > 0.

    Whole pages from 1 MiB on (patch 0020); a smaller one comes from torch's allocator: the next power of two.
    """
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES if nbytes >= 2**20 else 1 << (nbytes - 1).bit_length()


@dataclass(frozen=True)
class Offload:
    """What --cpu-offload-gb moves to the host."""

    moved: int
    """Bytes of the tensors that are in host RAM."""
    pinned: int
    """Host RAM that they take, bytes."""
    staged: int
    """Most bytes of one layer: its hook copies them to the GPU before the layer runs."""


def offload(shape: Shape, expert_format: str, limit: int) -> Offload:
    """Return what an offload of `limit` bytes moves.

    Whole tensors, layer by layer, until `limit` is reached (SGLang's OffloaderV1): up to one tensor more than that.
    """
    tensors = layer_tensors(shape, expert_format)
    moved = pinned = staged = 0
    for _ in range(shape.layers):
        before = moved
        for nbytes in tensors:
            if moved >= limit:
                break
            moved += nbytes
            pinned += pinned_bytes(nbytes)
        staged = max(staged, moved - before)
    return Offload(moved, pinned, staged)


def table_bytes(shape: Shape) -> int:
    """Return the bytes of all n-gram tables as they are stored."""
    return shape.table_parameters * DTYPE_BYTES[shape.table_dtype]


def kv_bytes(shape: Shape, tokens: int, page: int, kv_dtype: str) -> int:
    """Return the bytes of the K and V pools of the QSA layers; one page more than `tokens` is padding."""
    return (tokens + page) * shape.qsa_layers * 2 * shape.kv_heads * shape.head_dim * KV_BYTES[kv_dtype]


def index_bytes(shape: Shape, tokens: int, page: int, max_requests: int) -> int:
    """Return the bytes of the QSA indexer: a bf16 key for each `index_ratio` tokens, and a ring a request."""
    compressed = -(-(tokens + page) // shape.index_ratio) * shape.index_dim * 2
    ring_slots = (max_requests + 1) * shape.index_ratio
    return shape.qsa_layers * (compressed + ring_slots * shape.index_dim * 2) + ring_slots * 3 * 8


def conv_state_bytes(shape: Shape, slots: int) -> int:
    """Return the bytes of the GDN convolution states (bf16): kernel - 1 columns of q, k and v; slot 0 is padding."""
    channels = 2 * shape.gdn_key_dim + shape.gdn_value_dim
    return (slots + 1) * shape.gdn_layers * channels * (shape.conv_kernel - 1) * 2


def ssm_state_bytes(shape: Shape, slots: int) -> int:
    """Return the bytes of the GDN recurrent states: fp32 [value heads, value dim, key dim]; slot 0 is padding."""
    state = shape.gdn_value_heads * shape.gdn_value_head_dim * shape.gdn_key_head_dim
    return (slots + 1) * shape.gdn_layers * state * 4


def ple_state_bytes(shape: Shape, slots: int) -> int:
    """Return the bytes of the PLE convolution windows and n-gram contexts of all slots."""
    if not shape.ple_layers:
        return 0
    window = shape.streams * shape.hidden * (shape.ple_conv_kernel - 1) * shape.ngram_size
    context = (shape.ngram_size - 1) * 8
    return (slots + 1) * (shape.ple_layers * window * DTYPE_BYTES[shape.dtype] + context)


def reserve_bytes(chunk: int, max_requests: int) -> int:
    """Return what SGLang sets aside on the GPU when --mem-fraction-static is left out (its memory_hook, MiB)."""
    graphs = 2 * max_requests + 8 * 45  # decode sizes; 45 prefill sizes up to 4,096 tokens
    return round((512 + 1.5 * max(chunk, 2048) + 128 + graphs) * 2**20)


def compute(shape: Shape, settings: Settings) -> Budget:
    """Return the budget of `settings` for a text-only server of `shape`.

    Raises:
        UsageError: settings that contradict each other or the model.
    """
    settings.check(shape)
    width = DTYPE_BYTES[shape.dtype]
    items = [
        Item("always-used weights", "vram", shape.dense_parameters * width, f"{shape.dense_parameters:,} x {width} B"),
        *_experts(shape, settings),
        Item(
            "K and V", "vram", kv_bytes(shape, settings.pool_tokens, settings.page, settings.kv_dtype),
            f"({settings.pool_tokens:,} + {settings.page}) tokens x {shape.qsa_layers} layers x 2 x {shape.kv_heads} x "
            f"{shape.head_dim} x {KV_BYTES[settings.kv_dtype]} B",
        ),
        Item(
            "QSA index", "vram",
            index_bytes(shape, settings.pool_tokens, settings.page, settings.max_requests),
            f"tokens / {shape.index_ratio} x {shape.qsa_layers} layers x {shape.index_dim} x 2 B",
        ),
        Item(
            "GDN states", "vram", conv_state_bytes(shape, settings.slots) + ssm_state_bytes(shape, settings.slots),
            f"({settings.slots} + 1) slots x {shape.gdn_layers} layers x (fp32 state + bf16 conv)",
        ),
        Item("PLE states", "vram", ple_state_bytes(shape, settings.slots), f"({settings.slots} + 1) slots"),
        _table(shape, settings),
        Item(
            "GPU reserve", "vram", reserve_bytes(settings.chunk, settings.max_requests),
            f"SGLang's own: 512 + 1.5 x chunk ({max(settings.chunk, 2048):,}) + 128 + graphs, MiB", True,
        ),
        Item("server processes", "ram", PROCESS_BYTES, "estimate, not measured on a 24 GB machine", True),
    ]  # fmt: skip
    return Budget(tuple(items))


def _experts(shape: Shape, settings: Settings) -> list[Item]:
    total = routed_bytes(shape, settings.expert_format)
    what = f"{settings.expert_format}: {FORMATS[settings.expert_format].what}"
    if settings.resident_experts is not None:
        on_gpu = round(shape.layers * settings.resident_experts * expert_bytes(shape, settings.expert_format))
        return [
            Item("routed experts", "vram", on_gpu, f"{settings.resident_experts} of {shape.experts} a layer, {what}"),
            Item("routed experts", "ram", total, f"all {shape.experts} a layer, pinned at their exact size"),
        ]
    limit = settings.offload_gib or 0
    host = offload(shape, settings.expert_format, limit * GIB)
    return [
        Item("routed experts", "vram", max(0, total - host.moved), f"all but the offloaded, {what}"),
        Item(
            "routed experts", "ram", host.pinned,
            f"--cpu-offload-gb {limit}: whole tensors, layer by layer, pinned at their own size",
        ),
        Item("staged experts of one layer", "vram", host.staged, "copied to the GPU before the layer runs"),
    ]  # fmt: skip


def _table(shape: Shape, settings: Settings) -> Item:
    places: dict[Table, Place] = {"nvme": "disk", "pinned": "ram", "gpu": "vram"}
    return Item(
        "n-gram table", places[settings.table], table_bytes(shape),
        f"{shape.table_rows:,} rows x {shape.table_cols} x {DTYPE_BYTES[shape.table_dtype]} B",
    )  # fmt: skip
