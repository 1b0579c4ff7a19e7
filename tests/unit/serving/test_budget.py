"""The budget's formulas against real checkpoints, the published sizes, and the ledger."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from q4kit.claims.check import evaluate
from q4kit.claims.ledger import load as load_ledger
from q4kit.errors import UsageError
from q4kit.serving import budget
from q4kit.serving.budget import FORMATS, GIB, Settings
from q4kit.serving.profiles import PROFILES, Options, settings
from q4kit.serving.shape import PUBLISHED, Shape, from_config, load, table_rows
from q4kit.tinymodel import PRESETS, generate

ROOT = Path(__file__).resolve().parents[3]
MODEL = load(PUBLISHED)


@pytest.fixture(scope="module", params=["mini", "wide"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a generated checkpoint; "wide" has no two sizes alike, so that no formula is right by accident."""
    options = PRESETS["mini"]
    if request.param == "wide":
        options = replace(
            options, layers=8, experts=6, expert_size=48, kv_heads=1, gdn_value_heads=6, indexer_heads=2,
            hc_lowrank=24, ple_embed_dim=128, ple_layers=(2,), vocab_size=640, table_rows=300, split_parts=3,
            ple_dtype="float8_e4m3fn",
        )  # fmt: skip
    folder = tmp_path_factory.mktemp("checkpoint") / request.param
    generate(folder, options)
    return folder


def elements(folder: Path) -> dict[str, int]:
    """Return the elements of the tensors in the safetensors headers, by group of the budget."""
    sums = {"dense": 0, "routed": 0, "table": 0, "table_rows": 0}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        for name, entry in header.items():
            if name == "__metadata__" or ".visual." in name or entry["dtype"] == "I64" or "weight_scale" in name:
                continue
            size = 1
            for n in entry["shape"]:
                size *= n
            group = "table" if ".ngram_embedding." in name else "routed" if ".mlp.experts." in name else "dense"
            sums[group] += size
            if group == "table":
                sums["table_rows"] += entry["shape"][0]
    return sums


def test_parameter_counts_are_those_of_a_real_checkpoint(checkpoint: Path) -> None:
    shape, real = load(checkpoint), elements(checkpoint)
    assert real["dense"] > 0
    assert shape.dense_parameters == real["dense"]
    assert shape.routed_parameters == real["routed"]
    assert shape.table_parameters == real["table"]
    assert shape.table_rows == real["table_rows"]


def test_the_published_model_comes_out_at_its_published_size() -> None:
    assert MODEL.parameters / 1e9 == pytest.approx(176, abs=0.5)
    active = MODEL.dense_parameters - MODEL.vocab * MODEL.hidden  # the embedding is looked up, not multiplied
    active += MODEL.layers * MODEL.top_k * MODEL.expert_parameters
    assert active / 1e9 == pytest.approx(6, abs=0.5)
    assert (MODEL.gdn_layers, MODEL.qsa_layers) == (36, 12)
    assert MODEL.table_rows == 320_001_536
    assert budget.table_bytes(MODEL) == 51_200_245_760


@pytest.mark.parametrize("name", ["bf16", "fp8", "nvfp4", "int4", "int2"])
def test_the_ledger_quotes_this_formula_for_the_experts(name: str) -> None:
    claim = load_ledger(ROOT / "results" / "claims.toml").claims[f"experts-{name}-gib"]
    assert round(budget.routed_bytes(MODEL, name) / GIB, 1) == claim.value
    assert claim.owner == "derived"


def test_paged_experts_keep_all_of_them_in_ram_and_offload_does_not() -> None:
    paged = budget.compute(MODEL, Settings(resident_experts=64))
    assert [i.nbytes for i in paged.items if i.name == "routed experts" and i.place == "ram"] == [
        budget.routed_bytes(MODEL, "nvfp4")
    ]
    host = budget.offload(MODEL, "nvfp4", 50 * GIB)
    offload = budget.compute(MODEL, Settings(offload_gib=50))
    on_gpu, in_ram = [i.nbytes for i in offload.items if i.name == "routed experts"]
    assert on_gpu + host.moved == budget.routed_bytes(MODEL, "nvfp4")
    assert in_ram == host.pinned
    assert offload.total("ram") == in_ram + budget.PROCESS_BYTES


@pytest.mark.parametrize("name", ["nvfp4", "int4", "int2", "bf16"])
def test_an_offload_larger_than_the_experts_leaves_none_on_the_gpu(name: str) -> None:
    found = budget.compute(MODEL, Settings(offload_gib=1000, expert_format=name))
    assert [i.nbytes for i in found.items if i.name == "routed experts"] == [0, budget.routed_bytes(MODEL, name)]


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_tensors_of_all_layers_are_all_routed_experts(name: str) -> None:
    assert MODEL.layers * sum(budget.layer_tensors(MODEL, name)) == budget.routed_bytes(MODEL, name)


@pytest.mark.parametrize(
    ("nbytes", "block"),
    [(1, 1), (3, 4), (2**20 - 1, 2**20), (2**20, 2**20), (2**20 + 1, 2**20 + 4096), (838_860_800, 838_860_800)],
)
def test_a_pinned_tensor_takes_its_own_size_from_a_mebibyte_on(nbytes: int, block: int) -> None:
    assert budget.pinned_bytes(nbytes) == block


def test_an_offload_moves_whole_tensors_layer_by_layer() -> None:
    """As SGLang: it stops at the first tensor that finds the limit reached, and so goes past it by part of one."""
    first, second, *rest = budget.layer_tensors(MODEL, "int4")
    layer = first + second + sum(rest)
    assert budget.offload(MODEL, "int4", 0) == budget.Offload(0, 0, 0)
    assert budget.offload(MODEL, "int4", 1) == budget.Offload(first, first, first)
    assert budget.offload(MODEL, "int4", first + 1) == budget.Offload(*[first + second] * 3)
    whole = budget.offload(MODEL, "int4", 3 * layer + 1)
    assert (whole.moved, whole.staged) == (3 * layer + first, layer)


def test_an_offload_needs_room_for_one_layer_on_the_gpu() -> None:
    """Its hook copies what was offloaded to the GPU before the layer runs."""
    layer = sum(budget.layer_tensors(MODEL, "int4"))
    assert (
        budget.compute(MODEL, Settings(offload_gib=40, expert_format="int4")).of("staged experts of one layer") == layer
    )
    assert budget.compute(MODEL, Settings(offload_gib=0)).of("staged experts of one layer") == 0


@pytest.mark.parametrize(("table", "place"), [("nvme", "disk"), ("pinned", "ram"), ("gpu", "vram")])
def test_the_table_is_counted_where_it_lives(table: budget.Table, place: budget.Place) -> None:
    found = budget.compute(MODEL, Settings(table=table))
    (item,) = [i for i in found.items if i.name == "n-gram table"]
    assert (item.place, item.nbytes) == (place, 51_200_245_760)


def test_every_knob_moves_its_own_part_and_no_other() -> None:
    base = Settings(resident_experts=64)

    def moved(**change: object) -> set[str]:
        before, after = budget.compute(MODEL, base), budget.compute(MODEL, replace(base, **change))  # type: ignore[arg-type]
        return {b.name for b, a in zip(before.items, after.items, strict=True) if b.nbytes != a.nbytes}

    assert moved(context=65536) == {"K and V", "QSA index"}
    assert moved(kv_dtype="fp8_e4m3") == {"K and V"}
    assert moved(resident_experts=32) == {"routed experts"}
    assert moved(expert_format="int4") == {"routed experts"}
    assert moved(state_slots=100) == {"GDN states", "PLE states"}
    assert moved(chunk=8192) == {"GPU reserve"}
    assert moved(max_requests=4, tokens=65536, state_slots=16) == {"GPU reserve", "QSA index"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(expert_format="int3"), "expert format 'int3'"),
        (Settings(kv_dtype="fp4"), "KV dtype 'fp4'"),
        (Settings(resident_experts=9), r"9 resident experts: expected 10 .* to 512"),
        (Settings(resident_experts=513), "513 resident experts"),
        (Settings(resident_experts=64, offload_gib=1), "exclude each other"),
        (Settings(context=0), "context is 0"),
        (Settings(offload_gib=-1), "offload is -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: Settings, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        budget.compute(MODEL, settings)


def test_a_config_without_a_size_names_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'num_hidden_layers' is missing"):
        from_config({"text_config": {"hidden_size": 4}}, "x")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be decoded"):
        load(tmp_path)
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "nothing.json")


@pytest.mark.parametrize("key", ["ple_embedding_dtype", "dtype"])
def test_an_unknown_dtype_is_named_with_the_known_ones(tmp_path: Path, key: str) -> None:
    generate(tmp_path / "m", PRESETS["mini"])
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["text_config"][key] = "float6"
    with pytest.raises(UsageError, match=f"x: {key} is 'float6'") as caught:
        from_config(config, "x")
    assert "bfloat16" in caught.value.remedy


def test_hash_heads_get_different_primes() -> None:
    assert table_rows(10, 3, 2, 1) == [11 + 13 + 17, 19 + 23 + 29]
    assert table_rows(10, 3, 1, 8) == [48]


def test_served_formats_are_the_ones_with_a_kernel() -> None:
    assert {name for name, f in FORMATS.items() if not f.served} == {"int2"}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/budget.py", *args], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_tool_says_whether_it_fits() -> None:
    fits = run("--resident-experts", "64", "--vram", "24", "--ram", "120", "--json")
    assert fits.returncode == 0, fits.stderr
    data = json.loads(fits.stdout)
    assert data["verdict"] == "FITS"
    assert data["bytes"]["disk"] == 51_200_245_760
    small = run("--resident-experts", "64", "--vram", "24", "--ram", "32")
    assert small.returncode == 1
    assert "DOES NOT FIT" in small.stdout
    assert "RAM 68.3 GiB of 32" in small.stdout


def test_the_tool_refuses_bad_input() -> None:
    assert run("--resident-experts", "3").returncode == 2
    assert "cannot serve int2" in run("--expert-format", "int2", "--offload-gib", "20").stdout


def shape_of(**change: object) -> Shape:
    return replace(MODEL, **change)  # type: ignore[arg-type]


def test_caches_scale_with_their_layers() -> None:
    assert budget.kv_bytes(shape_of(qsa_layers=24), 1000, 64, "bf16") == 2 * budget.kv_bytes(MODEL, 1000, 64, "bf16")
    assert budget.ssm_state_bytes(shape_of(gdn_layers=72), 9) == 2 * budget.ssm_state_bytes(MODEL, 9)
    assert budget.ple_state_bytes(shape_of(ple_layers=0), 9) == 0


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("24gb-32ram", "int2"),
        ("24gb-64ram", "int4"),
        ("24gb-64ram", "nvfp4"),
        ("24gb-128ram", "int4"),
        ("24gb-128ram", "nvfp4"),
    ],
)
def test_the_ledger_quotes_the_budget_of_each_profile(profile: str, name: str) -> None:
    """docs/SERVING.md prints these sums; a changed default must change them there."""
    claims = load_ledger(ROOT / "results" / "claims.toml").claims
    found = budget.compute(MODEL, settings(PROFILES[profile], Options(), MODEL, name))
    for place in ("vram", "ram"):
        claim = claims[f"budget-{profile.removeprefix('24gb-')}-{name}-{place}"]
        assert evaluate(claim.formula) == pytest.approx(found.total(place) / GIB, rel=1e-9)  # type: ignore[arg-type]
        assert round(found.total(place) / GIB, 1) == claim.value  # type: ignore[arg-type]
