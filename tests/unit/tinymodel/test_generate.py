"""Generated checkpoints: reproducible, complete for transformers in both expert layouts, all or nothing on
disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from q4kit.errors import EnvironmentFault, UsageError
from q4kit.tinymodel import PRESETS, Options, generate
from q4kit.tinymodel.options import PLE_FP8_SCALE

TOOL = Path(__file__).resolve().parents[3] / "tools" / "make_tiny_model.py"
MINI = replace(PRESETS["mini"], dtype="float32")
TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"


def make(folder: Path, options: Options = MINI, **kwargs: Any) -> Path:
    """Generate and return the folder."""
    return generate(folder, options, **kwargs).path


def hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor, read as the index says."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def fused_and_joined(checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as one table a layer and one fused tensor a projection, whatever the layout."""
    out = dict(checkpoint)
    parts = sorted(
        (n for n in checkpoint if ".ngram_embedding.shard_" in n),
        key=lambda n: (n.split(".shard_")[0], int(n.split(".shard_")[1].split(".")[0])),
    )
    for prefix in sorted({n.split(".shard_")[0] for n in parts}):
        out[f"{prefix}.weight"] = torch.cat([out.pop(n) for n in parts if n.startswith(f"{prefix}.shard_")])
    for prefix in sorted({n.split(".experts.")[0] for n in checkpoint if n.endswith("experts.0.gate_proj.weight")}):
        count = sum(n.startswith(f"{prefix}.experts.") and n.endswith(".down_proj.weight") for n in checkpoint)
        take = lambda e, p, prefix=prefix: out.pop(f"{prefix}.experts.{e}.{p}.weight")  # noqa: E731
        out[f"{prefix}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([take(e, "gate_proj"), take(e, "up_proj")]) for e in range(count)]
        )
        out[f"{prefix}.experts.down_proj"] = torch.stack([take(e, "down_proj") for e in range(count)])
    return out


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the fp32 mini checkpoint."""
    return make(tmp_path_factory.mktemp("made") / "mini")


def test_same_options_same_bytes(mini: Path, tmp_path: Path) -> None:
    again = make(tmp_path / "again")
    assert hashes(again) == hashes(mini)
    other = hashes(make(tmp_path / "other", replace(MINI, seed=1)))
    assert other["config.json"] == hashes(mini)["config.json"]
    changed = {n for n in other if other[n] != hashes(mini)[n]}
    assert changed == {n for n in other if n.endswith(".safetensors")} | {"generation_args.json"}


def test_values_do_not_depend_on_layout_split_or_file_size(mini: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", replace(MINI, expert_layout="fused", split_parts=3, max_shard_size=300_000))
    assert len(list(other.glob("*.safetensors"))) > len(list(mini.glob("*.safetensors"))) > 1
    expected, found = fused_and_joined(tensors(mini)), fused_and_joined(tensors(other))
    assert expected.keys() == found.keys()
    assert [n for n in expected if not torch.equal(expected[n], found[n])] == []
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors(other)
    assert f"{TABLE}.shard_2.weight" in tensors(other)
    assert f"{TABLE}.shard_3.weight" not in tensors(other)


def test_dtypes_hold_the_same_values(mini: Path, tmp_path: Path) -> None:
    narrow = tensors(make(tmp_path / "bf16", replace(MINI, dtype="bfloat16")))
    for name, wide in tensors(mini).items():
        if wide.is_floating_point():
            assert narrow[name].dtype == torch.bfloat16
        assert torch.equal(narrow[name].to(wide.dtype), wide), name


@pytest.mark.parametrize("layout", ["per-expert", "fused"])
def test_transformers_finds_every_tensor_and_no_other(layout: Any, tmp_path: Path) -> None:
    from transformers import Qwen4ExpForConditionalGeneration

    folder = make(tmp_path / "model", replace(MINI, expert_layout=layout))
    model, info = Qwen4ExpForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert {k: list(v) for k, v in info.items() if v} == {}
    expected = fused_and_joined(tensors(folder))
    loaded = model.state_dict()
    assert expected.keys() == loaded.keys()
    assert [n for n in expected if not torch.equal(expected[n], loaded[n])] == []


def test_tensors_are_those_that_transformers_itself_saves(mini: Path, tmp_path: Path) -> None:
    from transformers import Qwen4ExpForConditionalGeneration

    Qwen4ExpForConditionalGeneration.from_pretrained(mini, dtype=torch.float32).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        assert set(saved.keys()) == set(tensors(mini))


def test_values_are_spread_and_nothing_is_neutral(mini: Path) -> None:
    for name, tensor in tensors(mini).items():
        if tensor.is_floating_point() and tensor.numel() > 1:
            assert torch.isfinite(tensor).all(), name
            assert tensor.std() > 0.01, name
    table = fused_and_joined(tensors(mini))[f"{TABLE}.weight"]
    assert table.shape == (9088, 4)
    assert table.mean().abs() < 0.02
    assert abs(table.std().item() - 1) < 0.02
    assert len(table.unique(dim=0)) == len(table)
    experts = fused_and_joined(tensors(mini))["model.language_model.layers.0.mlp.experts.down_proj"]
    assert abs(experts.std().item() * math.sqrt(32) - 1) < 0.02
    assert not torch.equal(experts[0], experts[1])


def test_fp8_table_is_the_bf16_one_times_its_scale(tmp_path: Path) -> None:
    made = tensors(make(tmp_path / "fp8", replace(PRESETS["mini"], ple_dtype="float8_e4m3fn")))
    plain = tensors(make(tmp_path / "bf16", PRESETS["mini"]))
    assert made[f"{TABLE}.weight_scale"].tolist() == [PLE_FP8_SCALE]
    shard = made[f"{TABLE}.shard_0.weight"]
    assert shard.dtype == torch.float8_e4m3fn
    error = (shard.double() * PLE_FP8_SCALE - plain[f"{TABLE}.shard_0.weight"].double()).abs()
    # e4m3 keeps 3 mantissa bits: half a step is 1/16 of the value; bf16 adds 1/512, subnormals half of 2**-9
    # scaled
    value = plain[f"{TABLE}.shard_0.weight"].double().abs()
    assert (error <= value * (1 / 16 + 1 / 256) + 2**-10 * PLE_FP8_SCALE).all()
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["text_config"]["ple_embedding_dtype"] == "float8_e4m3fn"


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the fp32 mini checkpoint with a multi-token-prediction head."""
    return make(tmp_path_factory.mktemp("made") / "mtp", replace(MINI, mtp_layers=1))


def test_mtp_head_is_an_attention_layer_a_mixer_and_the_fusion(mini: Path, drafting: Path) -> None:
    model, made = tensors(mini), tensors(drafting)
    assert [n for n in model if not torch.equal(model[n], made[n])] == []
    head = {n: t for n, t in made.items() if n not in model}
    layer, mixer = "model.language_model.layers.3.", "model.language_model.hyper_connection_mixer."
    like = {n: "mtp.layers.0." + n.removeprefix(layer) for n in model if n.startswith(layer)}
    like |= {n: "mtp." + n.removeprefix("model.language_model.") for n in model if n.startswith(mixer)}
    assert "mtp.layers.0.self_attn.indexer.index_qk_proj.weight" in like.values()
    assert {made[n].shape for n in like} == {head[n].shape for n in like.values()}
    shapes = {n: tuple(t.shape) for n, t in head.items() if n not in like.values()}
    assert shapes == {
        "mtp.fc_embedding.weight": (64, 64),
        "mtp.fc_hidden.weight": (64, 64),
        "mtp.pre_fc_norm_embedding.weight": (64,),
        "mtp.pre_fc_norm_hidden.weight": (4 * 64,),
    }
    for there, here in like.items():  # a layer of its own, and the model's mixer
        assert torch.equal(made[there], head[here]) == there.startswith(mixer), here
    own = head["mtp.fc_embedding.weight"]
    assert (own - 8 * torch.eye(64)).std() < 0.2
    config = json.loads((drafting / "config.json").read_text())["text_config"]
    assert config.pop("mtp_num_hidden_layers") == 1
    assert config == json.loads((mini / "config.json").read_text())["text_config"]


def test_mtp_head_is_the_same_in_every_layout_and_dtype(drafting: Path, tmp_path: Path) -> None:
    other = replace(MINI, mtp_layers=1, expert_layout="fused", split_parts=3, dtype="bfloat16")
    expected, found = fused_and_joined(tensors(drafting)), fused_and_joined(tensors(make(tmp_path / "other", other)))
    assert expected.keys() == found.keys()
    for name in (n for n in expected if n.startswith("mtp.")):
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name].float(), expected[name]), name


def test_transformers_serves_a_model_with_an_mtp_head_without_it(drafting: Path) -> None:
    from transformers import Qwen4ExpForConditionalGeneration

    _, info = Qwen4ExpForConditionalGeneration.from_pretrained(drafting, dtype=torch.float32, output_loading_info=True)
    assert {k: list(v) for k, v in info.items() if v} == {}


def test_embedding_std_scales_the_token_embedding_alone(mini: Path, tmp_path: Path) -> None:
    model, wide = tensors(mini), tensors(make(tmp_path / "wide", replace(MINI, embedding_std=2.0)))
    changed = {n for n in model if not torch.equal(model[n], wide[n])}
    assert changed == {"model.language_model.embed_tokens.weight"}
    assert torch.equal(wide[changed.pop()], 2 * model["model.language_model.embed_tokens.weight"])


def test_arguments_are_written_down(mini: Path) -> None:
    written = json.loads((mini / "generation_args.json").read_text())
    assert Options(**{k: tuple(v) if isinstance(v, list) else v for k, v in written.items()}) == MINI


def test_tokenizer_and_processor_load(mini: Path) -> None:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(mini)
    config = json.loads((mini / "config.json").read_text())
    tokenizer = processor.tokenizer
    assert len(tokenizer) == config["text_config"]["vocab_size"]
    assert tokenizer.eos_token_id == config["text_config"]["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == config["image_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|vision_end|>") == config["vision_end_token_id"]
    text = "the secret number is 12345: ça va? 針"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert chat == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>hi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 6}, "layers is 6"),
        ({"layers": 0}, "layers is 0"),
        ({"experts": 1}, "experts_per_token is 2, there are 1 experts"),
        ({"ple_layers": (4,)}, r"ple_layers \[4\]"),
        ({"ple_layers": (0,)}, r"ple_layers \[0\]"),
        ({"vocab_size": 100}, "vocab_size is 100"),
        ({"eos_token_id": 512}, "eos_token_id is 512"),
        ({"indexer_budget": 2048}, "2048 / 2"),
        ({"ple_dtype": "bfloat16"}, "ple_dtype bfloat16 with dtype float32"),
        ({"max_shard_size": 0}, "max_shard_size is 0"),
        ({"mtp_layers": 2}, "mtp_layers is 2"),
        ({"mtp_layers": -1}, "mtp_layers is -1"),
        ({"embedding_std": 0.0}, "embedding_std is 0.0"),
        ({"embedding_std": math.nan}, "embedding_std is nan"),
    ],
)
def test_impossible_options_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(MINI, **change)


def test_impossible_split_and_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be split into 9000 parts"):
        make(tmp_path / "model", replace(MINI, split_parts=9000))
    with pytest.raises(UsageError, match="transformers refuses"):
        make(tmp_path / "model", replace(MINI, ple_embed_dim=63))
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_kept_unless_forced(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    before = hashes(folder)
    with pytest.raises(UsageError, match="is not empty"):
        make(folder, replace(MINI, seed=5))
    assert hashes(folder) == before
    make(folder, replace(MINI, seed=5), force=True)
    assert json.loads((folder / "generation_args.json").read_text())["seed"] == 5
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_force_does_not_delete_what_is_no_checkpoint(tmp_path: Path) -> None:
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="does not look like a checkpoint"):
        make(precious, force=True)
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_failed_replacement_keeps_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "model")
    before = hashes(folder)
    with pytest.raises(UsageError):
        make(folder, replace(MINI, split_parts=9000), force=True)
    assert hashes(folder) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_too_small_disk_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(EnvironmentFault, match=r"needs 0\.00 GB, .* has 0\.00 GB free"):
        make(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


FILL = """
import shutil, sys
from dataclasses import replace
from pathlib import Path
from q4kit.errors import EnvironmentFault
from q4kit.tinymodel import PRESETS, generate
real = shutil.disk_usage
shutil.disk_usage = lambda path: real(path)._replace(free=1 << 40)  # as if somebody else fills it meanwhile
try:
    generate(Path(sys.argv[1]) / "model", PRESETS["mini"])
except EnvironmentFault as error:
    print(error.render())
print(sorted(p.name for p in Path(sys.argv[1]).iterdir()))
"""


def test_disk_that_gets_full_leaves_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=1m none {small}"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small tmpfs")
    script = tmp_path / "fill.py"
    script.write_text(FILL)
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", f"{mount} && exec {sys.executable} {script} {small}"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert "is full; nothing was left behind" in lines[0]
    assert lines[1].startswith("remedy: free space")
    assert lines[-1] == "[]"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_generation_never_looks_complete(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "model"
    command = [sys.executable, str(TOOL), str(out), "--preset", "mid", "--layers", "4", "--max-shard-size", "100MB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".model.partial-*/*.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert not out.exists()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted; nothing was left behind" in errors
        assert list(tmp_path.iterdir()) == []


def test_tool_reports_errors_with_their_exit_code(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False)

    (tmp_path / "file").write_text("")
    done = run(str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not a folder" in done.stderr
    assert "remedy:" in done.stderr
    done = run(str(tmp_path / "model"), "--max-shard-size", "12 parsecs")
    assert done.returncode == 2
    assert "'12 parsecs' is not a size" in done.stderr
    if os.geteuid() == 0:
        done = run("/proc/model")  # a folder that even root cannot write to
        assert done.returncode == 2
        assert "cannot write /proc/model" in done.stderr
