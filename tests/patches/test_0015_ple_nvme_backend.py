"""`--ple-offload-backend nvme`: no table in memory, bit-equal rows, bad combinations and tables refused by name."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import ple_checkpoints
import ple_rows_kit
import pytest
import tiny_qwen4
import torch
from ple_checkpoints import SHARD, loaded, ple_modules
from qwen4_modules import runtime
from sglang.srt import runtime_context
from sglang.srt.arg_groups import model_path_hook
from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
from sglang.srt.arg_groups.fields.exec_ import ExecOffload
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

NVME = ("--ple-offload-backend", "nvme")
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
pytestmark = pytest.mark.red_on_stock


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16)


def write_flat(directory: Path, layer: int, table: torch.Tensor, scale: float, **changes: Any) -> None:
    """Write `table` as the flat table of PLE layer `layer`."""
    folder = directory / f"layers.{layer}"
    folder.mkdir(parents=True)
    table.view(torch.uint8).numpy().tofile(folder / "rows.bin")
    description = dict(
        format="ple-flat",
        version=1,
        file="rows.bin",
        rows=table.shape[0],
        dim=table.shape[1],
        dtype=str(table.dtype).removeprefix("torch."),
        weight_scale=scale,
    )
    (folder / "ple.json").write_text(json.dumps(description | changes))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen4.write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module", params=[BF16, FP8], ids=["bf16", "fp8"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ple_checkpoints.write(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--tp-size", "2"), "--tp-size 1 (got 2)"),
        (("--pp-size", "2"), "--pp-size 1 (got 2)"),
        # Attention DP splits a tensor parallel group, but is what the user asked for, so it is named first.
        (("--attn-dp-size", "2"), "remove --attn-dp-size (got 2)"),
        (("--tp-size", "2", "--attn-dp-size", "2"), "remove --attn-dp-size (got 2)"),
        (("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"), "and --enable-dp-attention"),
        (("--no-ple-offload-embedding",), "requires --ple-offload-embedding"),
        (("--weight-loader-disable-mmap",), "remove that flag"),
        (("--delete-ckpt-after-loading",), "--delete-ckpt-after-loading"),
        (("--device", "xpu"), "got --device xpu: remove"),
        (("--device", "npu"), "got --device npu: remove"),
        (("--weight-loader-prefetch-checkpoints",), "remove that flag"),
        (("--weight-cache-mode", "client"), "set --weight-cache-mode off"),
        (("--checkpoint-engine-wait-weights-before-ready",), "remove --checkpoint-engine-wait-weights-before-ready"),
    ],
)
def test_wrong_combinations_name_the_remedy(config: Path, flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match="--ple-offload-backend nvme") as error, runtime(config, *NVME, *flags):
        pass
    assert named in str(error.value)


def test_a_rocm_gpu_is_refused(config: Path) -> None:
    with (
        runtime_context.override_platform(is_hip=True),
        pytest.raises(ValueError, match=r"--ple-offload-backend nvme copies rows to an NVIDIA GPU .* got a ROCm GPU"),
        runtime(config, *NVME, "--device", "cuda"),
    ):
        pass


LOCAL_SAFETENSORS = {"auto", "safetensors"}


@pytest.mark.parametrize("load_format", [f for f in LOAD_FORMAT_CHOICES if f not in LOCAL_SAFETENSORS])
def test_load_formats_that_do_not_pass_over_shards_are_refused(config: Path, load_format: str) -> None:
    with (
        pytest.raises(ValueError, match=f"--ple-offload-backend nvme .* --load-format {load_format} ") as error,
        runtime(config, *NVME, "--load-format", load_format),
    ):
        pass
    assert "--load-format auto or safetensors" in str(error.value)


@pytest.mark.parametrize("load_format", sorted(LOCAL_SAFETENSORS))
def test_local_safetensors_are_served(config: Path, load_format: str) -> None:
    with runtime(config, *NVME, "--load-format", load_format) as active:
        assert active.server_args.load_format == load_format


@pytest.mark.parametrize(("predicate", "chosen"), [("is_remote_url", "remote"), ("check_gguf_file", "gguf")])
def test_a_load_format_chosen_for_the_path_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, predicate: str, chosen: str
) -> None:
    """What SGLang resolves a remote or GGUF model path to, late in the resolution of the arguments."""
    monkeypatch.setattr(model_path_hook, predicate, lambda path: True)
    with pytest.raises(ValueError, match=f"--load-format {chosen} "), runtime(config, *NVME):
        pass


def test_help_names_what_the_backend_needs() -> None:
    (field,) = [f for f in msgspec.structs.fields(ExecOffload) if f.name == "ple_offload_backend"]
    (arg,) = [a for a in typing.get_type_hints(ExecOffload, include_extras=True)[field.name].__metadata__]
    assert "'nvme'" in arg.help
    assert "any device" not in arg.help
    assert "NVIDIA GPUs and CPUs" in arg.help


def test_a_reader_without_the_backend_is_refused(config: Path) -> None:
    with (
        pytest.raises(ValueError, match="requires --ple-offload-backend nvme"),
        runtime(config, "--ple-offload-reader", "pread"),
    ):
        pass


def test_the_backend_implies_offload(config: Path) -> None:
    with runtime(config, *NVME):
        assert runtime_context.get_exec().offload.ple_offload_embedding is True


def test_the_backend_takes_cpu_offload(config: Path) -> None:
    with runtime(config, *NVME, "--cpu-offload-gb", "1"):
        assert runtime_context.get_exec().offload.cpu_offload_gb == 1


def test_no_tensor_grows_with_the_table(tmp_path: Path) -> None:
    def footprint(base: int) -> tuple[int, int]:
        directory = tiny_qwen4.write_config(tmp_path / str(base), ngram_vocab_size_base=base)
        with runtime(directory, *NVME) as active:
            text = active.model_config.hf_text_config
            text.ple_offload_embedding, text.ple_offload_backend = True, "nvme"
            model = active.build_model()
            held = [*model.parameters(), *model.buffers()]
            rows = max(module.ngram_embedding.org_vocab_size for module in ple_modules(model).values())
            return sum(t.numel() * t.element_size() for t in held if t.device.type != "meta"), rows

    (small, few), (large, many) = footprint(500), footprint(2_000_000)
    assert many > 1000 * few
    assert large == small


_PEAK = """
import json, sys
from pathlib import Path
import ple_checkpoints
import torch
from qwen4_modules import runtime

def status(field):  # KiB
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

directory, nvme = ple_checkpoints.write(Path(sys.argv[1])), ("--ple-offload-backend", "nvme")
config = json.loads((directory / "config.json").read_text())
config["text_config"]["ngram_vocab_size_base"] = int(sys.argv[2])
(directory / "config.json").write_text(json.dumps(config))
with runtime(directory, *nvme) as active:
    text = active.model_config.hf_text_config
    text.ple_offload_embedding, text.ple_offload_backend = True, "nvme"
    modules = ple_checkpoints.ple_modules(active.build_model())
rows = {layer: module.ngram_embedding.org_vocab_size for layer, module in modules.items()}
ple_checkpoints.grow(directory, rows)
Path("/proc/self/clear_refs").write_text("5")  # the peak (VmHWM) starts again from what is resident now
before = status("VmRSS")
with ple_checkpoints.loaded(directory, *nvme) as model:
    for layer, module in ple_checkpoints.ple_modules(model).items():
        last = torch.arange(rows[layer] - 128, rows[layer])
        assert not module.ngram_embedding(last.view(8, 16), torch.arange(8)).any()
print(*rows.values(), status("VmHWM") - before)
"""


def test_the_peak_of_a_load_does_not_grow_with_the_table(tmp_path: Path) -> None:
    """Building, loading and reading, each in a process of its own; the tables are holes in the checkpoint."""
    # Every byte that malloc hands out is written to, so that what is allocated is resident too.
    env = os.environ | {"MALLOC_PERTURB_": "165", "PYTHONPATH": os.pathsep.join(sys.path)}

    def peak(base: str) -> list[int]:
        """Return the rows of each table, and by how many KiB the load raised the peak."""
        command = [sys.executable, "-c", _PEAK, str(tmp_path / base), base]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        return [int(number) for number in done.stdout.split()]

    with ThreadPoolExecutor(2) as pool:
        (*few, low), (*many, high) = pool.map(peak, ("62500", "1000000"))
    assert min(many) > 15 * max(few) > 15_000_000
    assert high - low < 4 << 10, "KiB; a table of 16 million rows has 125,000"


@pytest.mark.parametrize("reader", ["auto", "io_uring", "pread", "mmap"])
@pytest.mark.parametrize("flat", [False, True], ids=["shards", "flat"])
def test_rows_are_bit_equal_to_the_stored_table(checkpoint: Path, tmp_path: Path, reader: str, flat: bool) -> None:
    if reader == "io_uring" and (why := ple_rows_kit.io_uring_error()):
        pytest.skip(f"io_uring cannot be used here: {why}")
    tables = {layer: ple_checkpoints.table(checkpoint, layer) for layer in (1, 2)}
    flags = [*NVME, "--ple-offload-reader", reader]
    if flat:
        scale = ple_checkpoints.SCALE if tables[1].dtype == FP8 else 1.0
        for layer, table in tables.items():
            write_flat(tmp_path, layer, table, scale)
        flags += ["--ple-offload-dir", str(tmp_path)]
    with loaded(checkpoint, *flags) as model:
        for layer, module in ple_modules(model).items():
            table = tables[layer]
            ids = torch.randint(0, len(table), (50, 16), generator=torch.Generator().manual_seed(layer))
            ids[0, :2] = torch.tensor([0, len(table) - 1])
            scale = module.ngram_embedding.weight_scale
            assert scale.dtype == BF16
            assert scale.item() == (ple_checkpoints.SCALE if table.dtype == FP8 else 1.0)
            expected = table.view(torch.uint8)[ids].view(table.dtype).to(BF16) * scale
            assert torch.equal(bits(module.ngram_embedding(ids, torch.arange(50))), bits(expected))
            assert reader in ("auto", module.ngram_embedding.reader.name)


def test_a_boot_writes_nothing(checkpoint: Path) -> None:
    def state() -> list[tuple[str, int, int]]:
        return sorted((p.name, p.stat().st_mtime_ns, p.stat().st_size) for p in checkpoint.iterdir())

    before = state()
    for _ in range(2):
        with loaded(checkpoint, *NVME):
            pass
    assert state() == before


def drop_shard(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in tensors if f"{SHARD}3." in name)]


def drop_all(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if SHARD in name]:
        del tensors[name]


def shorten(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if f"{SHARD}7." in name)
    tensors[name] = tensors[name][:-1].clone()


def to_fp32(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if SHARD in name]:
        tensors[name] = tensors[name].float()


def to_fp8(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if SHARD in name]:
        tensors[name] = tensors[name].to(FP8)
        tensors[name[: name.index(".shard_")] + ".weight_scale"] = torch.ones(1, dtype=BF16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop_shard, "lacks shard_3"),
        (drop_all, "--ple-offload-dir"),
        (shorten, "the model expects"),
        (to_fp32, "dtype F32"),
        (to_fp8, 'ple_embedding_dtype="float8_e4m3fn"'),
    ],
)
def test_a_table_that_is_not_the_models_is_refused(tmp_path: Path, change: Any, named: str) -> None:
    directory = ple_checkpoints.write(tmp_path / "model")
    ple_checkpoints.edit(directory, change)
    with pytest.raises(ValueError, match=re.escape(named)), loaded(directory, *NVME):
        pass


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_an_unusable_scale_is_refused_by_name(tmp_path: Path, scale: float) -> None:
    directory = ple_checkpoints.write(tmp_path / "model", FP8)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("ngram_embedding.weight_scale")]:
            tensors[name] = torch.tensor([scale], dtype=BF16)

    ple_checkpoints.edit(directory, change)
    with pytest.raises(ValueError, match=r"ngram_embedding\.weight_scale"), loaded(directory, *NVME):
        pass


def test_a_flat_table_of_another_scale_is_refused(tmp_path: Path) -> None:
    directory = ple_checkpoints.write(tmp_path / "model", FP8)
    for layer in (1, 2):
        write_flat(tmp_path / "flat", layer, ple_checkpoints.table(directory, layer), scale=0.5)
    with (
        pytest.raises(ValueError, match=r"weight_scale 0\.5, the checkpoint has \[0\.0078125\]"),
        loaded(directory, *NVME, "--ple-offload-dir", str(tmp_path / "flat")),
    ):
        pass


def test_a_second_load_is_refused(checkpoint: Path) -> None:
    with loaded(checkpoint, *NVME) as model, pytest.raises(ValueError, match="restart the server"):
        model.load_weights(ple_checkpoints.tensors(checkpoint))


def state(model: Any) -> dict[str, bytes]:
    """Return the bytes of every parameter and buffer; some are never written, so they may hold NaN."""
    return {name: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in model.state_dict().items()}


UPDATES = {
    "disk": lambda updater, directory, weights: updater.update_weights_from_disk(str(directory), "auto"),
    "tensor": lambda updater, directory, weights: updater.update_weights_from_tensor(weights),
    "distributed": lambda updater, directory, weights: updater.load_weights_from_distributed(weights),
    "ipc": lambda updater, directory, weights: updater.update_weights_from_ipc(None),
}


@pytest.mark.parametrize("source", UPDATES)
def test_an_online_update_is_refused_before_it_touches_a_weight(checkpoint: Path, tmp_path: Path, source: str) -> None:
    """SGLang's own updater, its usual answer (success, message), and a server that goes on as it was."""
    other = ple_checkpoints.write(tmp_path / "other")
    ple_checkpoints.edit(other, lambda tensors: tensors.update({k: v + 1 for k, v in tensors.items() if "norm" in k}))
    with loaded(checkpoint, *NVME) as model:
        config = runtime_context.get_server_args()
        updater = WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=model_config_of(config),
            custom_weight_loaders={},
            get_model=lambda: model,
            update_model_fields=lambda *args, **kwargs: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )
        embedding = ple_modules(model)[1].ngram_embedding
        ids, seq_ids = torch.arange(32).reshape(2, 16), torch.arange(2)
        rows, before = embedding(ids, seq_ids), state(model)
        success, message = UPDATES[source](updater, other, list(ple_checkpoints.tensors(other)))
        assert not success
        assert "not supported with --ple-offload-backend nvme" in message
        assert "Restart the server" in message
        assert state(model) == before
        assert updater.model_config.model_path == str(checkpoint)
        assert torch.equal(bits(embedding(ids, seq_ids)), bits(rows))


class Faulty:
    """The real reader, with EIO for every batch that holds a poisoned row."""

    def __init__(self, reader: Any, poisoned: set[int]) -> None:
        self.reader, self.poisoned = reader, poisoned

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        if self.poisoned & set(ids.tolist()):
            out.fill_(0x7B)
            raise OSError(errno.EIO, os.strerror(errno.EIO), "shard_3")
        self.reader.read_rows(ids, out)


def test_a_read_error_fails_one_sequence_and_no_bytes_of_it_survive(checkpoint: Path) -> None:
    with loaded(checkpoint, *NVME) as model:
        embedding = ple_modules(model)[1].ngram_embedding
        ids = torch.arange(6 * 16).reshape(6, 16)
        seq_ids = torch.tensor([0, 0, 1, 1, 1, 2])
        expected = embedding(ids, seq_ids)
        embedding.reader = Faulty(embedding.reader, {3 * 16 + 5})
        rows = embedding(ids, seq_ids)
        assert torch.equal(bits(rows[seq_ids != 1]), bits(expected[seq_ids != 1]))
        assert not rows[seq_ids == 1].any()
        failed = model.take_failed_requests()
        assert list(failed) == [1]
        assert "shard_3" in failed[1]
        assert "Errno 5" in failed[1]
        assert model.take_failed_requests() == {}


def test_a_file_truncated_while_open_fails_the_read(tmp_path: Path) -> None:
    directory = ple_checkpoints.write(tmp_path / "model")
    with loaded(directory, *NVME, "--ple-offload-reader", "pread") as model:
        embedding = ple_modules(model)[2].ngram_embedding
        (path,) = directory.glob("*.safetensors")
        os.truncate(path, path.stat().st_size - 1)
        rows = embedding(torch.zeros((1, 16), dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        assert not rows.any()
        assert str(path) in model.take_failed_requests()[0]
