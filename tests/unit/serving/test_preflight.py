"""The checks before a start, on made-up machines and damaged checkpoints."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from serving_world import NVME, TABLE, config, machine, make_checkpoint, write_weights

from q4kit.errors import UsageError
from q4kit.serving import facts, preflight, profiles
from q4kit.serving.checkpoint import expert_format, inspect
from q4kit.serving.facts import GIB, Disk, Gpu, find_compilers
from q4kit.serving.profiles import PROFILES, Options
from q4kit.serving.shape import from_config


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


def checks(
    folder: Path, profile: str = "24gb-128ram", *, options: Options | None = None, accept: tuple[str, ...] = (),
    memory_max: int | None = None, table_dir: Path | None = None, extra: tuple[str, ...] = (), **change: Any,
) -> dict[str, preflight.Check]:  # fmt: skip
    """Return the findings by name; several of one name are joined by their first refusal."""
    found = inspect(folder, table_dir)
    shape = settings = None
    if found.config:
        shape = from_config(found.config, "m")
        named = expert_format(found.config)
        settings = profiles.settings(PROFILES[profile], options or Options(), shape, named)
    result: dict[str, preflight.Check] = {}
    for check in preflight.check(
        PROFILES[profile], machine(**change), found, shape, settings, memory_max=memory_max, accept=accept, extra=extra
    ):
        if check.name not in result or check.level == "refused":
            result[check.name] = check
    return result


def levels(found: dict[str, preflight.Check]) -> dict[str, str]:
    return {name: check.level for name, check in found.items() if check.level != "ok"}


def test_a_good_machine_and_checkpoint_pass_every_check(checkpoint: Path) -> None:
    found = checks(checkpoint)
    assert levels(found) == {}
    assert set(found) >= {"series", "port", "checkpoint", "GPU", "driver", "experts", "free VRAM", "host RAM"}


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"series": "applied, 5 of 19 patches"}, "series", "5 of 19"),
        ({"gpu": "nvidia-smi is not installed"}, "GPU", "not installed"),
        ({"gpu": Gpu("x", "570.12", 24564, 24210)}, "driver", "570.12"),
        ({"gpu": Gpu("x", "soon", 24564, 24210)}, "driver", "soon"),
        ({"gpu": Gpu("x", "580.1", 24564, 9000)}, "free VRAM", "8.8 GiB"),
        ({"ram_available": 60 * GIB}, "host RAM", "60.0 GiB"),
        ({"series": "clean"}, "series", "clean"),
        ({"port_free": False}, "port", "30000 is taken"),
        ({"model_disk": Disk("nfs4", "server:/export", None, GIB)}, "model disk", "network"),
        ({"model_disk": Disk("ext4", "sda1", True, GIB)}, "model disk", "rotational"),
        ({"model_disk": Disk("tmpfs", "tmpfs", None, GIB)}, "model disk", "RAM"),
        ({"run_disk": Disk("ext4", "nvme0n1", False, GIB)}, "free space", "1.0 GiB"),
    ],
)
def test_each_lack_is_refused_with_what_was_found_and_a_remedy(
    checkpoint: Path, change: dict[str, Any], name: str, words: str
) -> None:
    check = checks(checkpoint, **change)[name]
    assert check.level == "refused"
    assert words in check.found
    assert check.needed
    assert check.remedy


def test_everything_wrong_is_reported_at_once(checkpoint: Path) -> None:
    (checkpoint / "model-1.safetensors").unlink()
    found = checks(checkpoint, gpu="none", ram_available=GIB, series="clean", port_free=False)
    assert set(levels(found)) >= {"GPU", "host RAM", "series", "port", "checkpoint", "free VRAM"}


@pytest.mark.parametrize(
    ("disk", "level"),
    [
        (NVME, "ok"),
        (Disk("overlay", "overlay", None, GIB), "warning"),
        (Disk("ext4", "vda1", True, GIB), "warning"),
        (Disk("btrfs", "root", None, GIB), "warning"),
        (None, "warning"),
    ],
)
def test_disks_that_cannot_be_told_are_a_warning(checkpoint: Path, disk: Disk | None, level: str) -> None:
    assert checks(checkpoint, model_disk=disk)["model disk"].level == level


def test_an_accepted_check_no_longer_refuses(checkpoint: Path) -> None:
    found = checks(checkpoint, accept=("host RAM",), ram_available=GIB)
    assert found["host RAM"].level == "accepted"
    assert preflight.refused(list(found.values())) == []


@pytest.mark.parametrize("kind", ["bf16", "fp8", "nvfp4", "int4", "int2"])
@pytest.mark.parametrize("profile", ["24gb-32ram", "24gb-64ram", "24gb-128ram"])
def test_formats_by_profile(tmp_path: Path, profile: str, kind: str) -> None:
    check = checks(make_checkpoint(tmp_path / "m", kind), profile)["experts"]
    serves = kind in ("int4", "nvfp4") and profile != "24gb-32ram"
    assert check.level == ("ok" if serves else "refused")
    if kind == "int2" or profile == "24gb-32ram":
        assert "2-bit experts are not there yet" in check.remedy


def test_64_gb_of_ram_need_the_offload_not_the_pager(tmp_path: Path) -> None:
    """A 64 GB machine shows about 62 GiB, some of it used."""
    folder = make_checkpoint(tmp_path / "m", "int4")
    small = {"ram_total": 62 * GIB, "ram_available": 60 * GIB}
    assert checks(folder, "24gb-64ram", **small)["host RAM"].level == "ok"
    refused = checks(folder, "24gb-128ram", **small)["host RAM"]
    assert (refused.level, "--profile 24gb-64ram" in refused.remedy) == ("refused", True)


def test_the_offload_is_the_least_that_fits_the_card(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "int4")
    shape = from_config(inspect(folder).config, "m")
    from q4kit.serving import budget

    chosen = profiles.settings(PROFILES["24gb-64ram"], Options(), shape, "int4")
    assert chosen.offload_gib
    assert budget.compute(shape, chosen).total("vram") <= 23 * GIB
    less = profiles.settings(PROFILES["24gb-64ram"], Options(offload_gib=chosen.offload_gib - 1), shape, "int4")
    assert budget.compute(shape, less).total("vram") > 23 * GIB


def test_autoround_under_the_pager_is_a_warning(checkpoint: Path) -> None:
    body = config("int4") | {"quantization_config": {"quant_method": "auto-round", "bits": 4}}
    (checkpoint / "config.json").write_text(json.dumps(body))
    assert checks(checkpoint)["experts"].level == "warning"


def test_a_context_beyond_the_model_is_refused(checkpoint: Path) -> None:
    assert checks(checkpoint, options=Options(context=262_145, max_requests=1))["context"].level == "refused"


def test_a_checkpoint_without_a_chat_template_is_refused_unless_one_is_given(checkpoint: Path) -> None:
    """The smoke test would refuse it after the whole load."""
    (checkpoint / "tokenizer_config.json").write_text("{}")
    assert levels(checks(checkpoint)) == {"chat template": "refused"}
    for extra in (("--chat-template", "x.jinja"), ("--chat-template=x.jinja",)):
        assert levels(checks(checkpoint, extra=extra)) == {}


def test_a_memory_cap_needs_systemd_and_room(checkpoint: Path) -> None:
    assert levels(checks(checkpoint, memory_max=100 * GIB)) == {}
    found = checks(checkpoint, memory_max=10 * GIB, systemd="systemd does not run here")
    assert levels(found) == {"memory cap": "refused", "systemd scope": "refused"}
    assert "does not run" in found["systemd scope"].found


def test_remedies_are_shown_only_where_something_is_wrong(checkpoint: Path) -> None:
    text = preflight.table(list(checks(checkpoint).values())).text()
    assert "scripts/setup.sh" not in text
    assert "scripts/setup.sh" in preflight.table(list(checks(checkpoint, series="drifted").values())).text()


# -- the checkpoint itself ------------------------------------------------------------------------


def problem(folder: Path, table_dir: Path | None = None) -> str:
    found = inspect(folder, table_dir)
    assert not found.complete
    assert all(remedy for _, remedy in found.problems)
    return " | ".join(what for what, _ in found.problems)


def test_a_shard_cut_by_one_byte_or_grown_is_named_with_both_sizes(checkpoint: Path) -> None:
    path = checkpoint / "model-2.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"x"):
        path.write_bytes(damaged)
        assert f"model-2.safetensors: {len(damaged)} bytes, its header says {len(whole)}" in problem(checkpoint)


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 64, (5).to_bytes(8, "little") + b"nojso"])
def test_a_file_that_is_no_safetensors_is_named(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "model-1.safetensors").write_bytes(content)
    assert "model-1.safetensors" in problem(checkpoint)


def test_missing_pieces_are_named(checkpoint: Path) -> None:
    (checkpoint / "model-1.safetensors").unlink()
    (checkpoint / "tokenizer.json").unlink()
    text = problem(checkpoint)
    assert "model-1.safetensors is missing" in text
    assert "tokenizer.json" in text
    (checkpoint / "config.json").unlink()
    assert "config.json is missing" in problem(checkpoint)
    assert "is not a folder" in problem(checkpoint / "nowhere")


def test_a_tensor_that_its_file_does_not_hold_is_named(checkpoint: Path) -> None:
    write_weights(checkpoint / "model-2.safetensors", {f"{TABLE}.ngram_embedding.shard_1.weight": 4})
    assert "lacks 1 tensors of the index, e.g. norm.weight" in problem(checkpoint)


def test_a_missing_table_part_is_named(checkpoint: Path) -> None:
    body = config()
    body["text_config"]["split_ngram_parts"] = 3
    (checkpoint / "config.json").write_text(json.dumps(body))
    assert "1 of 3 table parts are missing, e.g. shard_2" in problem(checkpoint)


def test_a_flat_table_elsewhere_is_checked_instead(checkpoint: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    assert "ple.json is missing" in problem(checkpoint, flat)
    (flat / "ple.json").write_text(json.dumps({"file": "t.bin", "rows": 3, "dim": 4, "dtype": "float8_e4m3fn"}))
    assert "no usable flat table" in problem(checkpoint, flat)
    (flat / "t.bin").write_bytes(bytes(11))
    assert "11 bytes, its ple.json says 12" in problem(checkpoint, flat)
    (flat / "t.bin").write_bytes(bytes(12))
    assert inspect(checkpoint, flat).complete


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_broken_json_is_a_problem_not_a_crash(checkpoint: Path, text: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in problem(checkpoint)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}, "int4"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "gptq", "bits": 3}, "unknown: gptq, 3 bits"),
        ({"quant_method": "gguf"}, "unknown: gguf, ? bits"),
    ],
)
def test_declared_formats(quantization: dict[str, Any], expected: str) -> None:
    assert expert_format({"quantization_config": quantization}) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quantization": {"quant_algo": "FP8"}}, "fp8"),
    ],
)
def test_a_modelopt_checkpoint_may_name_its_format_in_a_file_of_its_own(
    tmp_path: Path, said: dict[str, Any], expected: str
) -> None:
    folder = make_checkpoint(tmp_path / "m", "bf16")
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert inspect(folder).expert_format == expected
    (folder / "config.json").write_text(json.dumps(config("int4")))
    assert inspect(folder).expert_format == "int4"  # the config wins, as in SGLang
    (folder / "config.json").write_text(json.dumps(config("bf16")))
    (folder / "hf_quant_config.json").write_text("{")
    assert "hf_quant_config.json cannot be read" in problem(folder)


def test_a_model_that_is_not_served_is_named_with_everything_else_that_is_wrong(checkpoint: Path) -> None:
    body = config() | {"model_type": "qwen3_moe"}
    (checkpoint / "config.json").write_text(json.dumps(body))
    (checkpoint / "tokenizer.json").unlink()
    assert levels(checks(checkpoint, series="clean")) == {
        "model": "refused", "checkpoint": "refused", "series": "refused",
    }  # fmt: skip


def test_options_of_another_placement_are_refused() -> None:
    shape = from_config(config(), "m")
    with pytest.raises(UsageError, match="does not page experts"):
        profiles.settings(PROFILES["24gb-64ram"], Options(resident_experts=64), shape, "int4")
    with pytest.raises(UsageError, match="--offload-gib"):
        profiles.settings(PROFILES["24gb-128ram"], Options(offload_gib=4), shape, "int4")
    with pytest.raises(UsageError, match="--in-place"):
        profiles.settings(PROFILES["tiny"], Options(experts_in_place=True), shape, "int4")


# -- facts of a real machine ----------------------------------------------------------------------


def test_nvidia_smi_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert facts.find_gpu() == "nvidia-smi is not installed"
    tool.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 580.95.05, 24564, 24210'\n")
    tool.chmod(0o755)
    assert facts.find_gpu() == Gpu("NVIDIA GeForce RTX 4090", "580.95.05", 24564, 24210)
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert facts.find_gpu() == "nvidia-smi exit code 6: No devices were found"
    tool.write_text("#!/bin/sh\necho 'what, is, this'\n")
    assert "answered 'what, is, this'" in str(facts.find_gpu())


def test_the_gpu_looked_at_is_the_first_that_the_server_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nfor word; do case $word in --id=1) echo 'B, 580.1, 24564, 20000'; exit 0 ;; esac; done\n"
        "echo 'A, 580.1, 12000, 11000'\necho 'B, 580.1, 24564, 20000'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert facts.find_gpu() == Gpu("B", "580.1", 24564, 20000, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert facts.find_gpu() == Gpu("B", "580.1", 24564, 20000, 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert facts.find_gpu() == Gpu("A", "580.1", 12000, 11000, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert facts.find_gpu() == "CUDA_VISIBLE_DEVICES=-1 hides every GPU"


def test_several_gpus_are_a_warning(checkpoint: Path) -> None:
    check = checks(checkpoint, gpu=Gpu("RTX 4090", "580.95.05", 24564, 24210, 2))["GPU"]
    assert (check.level, check.found) == ("warning", "RTX 4090, the first of 2")
    assert "CUDA_VISIBLE_DEVICES" in check.remedy


def test_a_container_limit_bounds_the_available_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("max", "1000000"), ("now", "400000")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(facts, "_CGROUPS", (tuple(str(tmp_path / n) for n in ("max", "now", "stat")),))
    assert facts.ram_available() == 600_000
    (tmp_path / "stat").write_text("anon 90000\nfile 300000\ninactive_file 200000\nactive_file 90000\nshmem 10000\n")
    assert facts.ram_available() == 890_000
    (tmp_path / "stat").write_text(
        "inactive_file 1\nactive_file 1\ntotal_inactive_file 100000\ntotal_active_file 50000\n"
    )
    assert facts.ram_available() == 750_000
    (tmp_path / "stat").write_text("damaged")
    assert facts.ram_available() == 600_000
    (tmp_path / "max").write_text("max")
    assert facts.ram_available() > 10**8


def test_the_disk_of_a_path_that_does_not_exist_yet_is_its_parents(tmp_path: Path) -> None:
    here, there = facts.find_disk(tmp_path), facts.find_disk(tmp_path / "not" / "yet")
    assert here is not None
    assert there is not None
    assert there.filesystem == here.filesystem
    assert here.free > 0


def test_rotational_is_read_from_the_disk_above_a_partition(tmp_path: Path) -> None:
    (tmp_path / "sda" / "queue").mkdir(parents=True)
    (tmp_path / "sda" / "sda1").mkdir()
    (tmp_path / "sda" / "queue" / "rotational").write_text("1\n")
    assert facts._rotational(tmp_path / "sda" / "sda1") is True
    assert facts._rotational(tmp_path / "nothing" / "here") is None


def test_half_a_series_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of the profiles need all patches."""
    from q4kit import series

    def found(state: str, prefix: int) -> str:
        status = series.SeriesStatus(state, prefix, 19, "x", "y")  # type: ignore[arg-type]
        monkeypatch.setattr(series, "status", lambda target: status)
        monkeypatch.setattr(series, "installed_target", lambda python: python)
        return facts.series_state("python")

    assert found("applied", 19) == "applied"
    assert found("applied", 5) == "applied, 5 of 19 patches"
    assert found("drifted", -1) == "drifted"


def test_an_environment_without_sglang_is_told(tmp_path: Path) -> None:
    assert facts.series_state(str(tmp_path / "no-python")).startswith("unknown: ")


def test_a_taken_port_is_seen() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not facts.port_is_free("127.0.0.1", port)
    assert facts.port_is_free("127.0.0.1", port)


def test_missing_compilers_are_a_warning_with_what_they_are_for(checkpoint: Path) -> None:
    assert checks(checkpoint)["compilers"].level == "ok"
    check = checks(checkpoint, compilers=("c++",))["compilers"]
    assert (check.level, check.found) == ("warning", "c++")
    assert "ninja" in check.remedy
    assert "nvcc" in check.remedy


def test_the_compilers_of_an_environment_that_is_not_activated_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for program in (tmp_path / "env" / "bin" / "ninja", tmp_path / "cuda" / "bin" / "nvcc"):
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
    assert find_compilers(str(tmp_path / "env" / "bin" / "python")) == ("ninja", "nvcc")
