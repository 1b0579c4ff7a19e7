"""Provenance: publishable, honest about what it does not know, and strict where it must be."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path

import psutil
import pytest

from q4kit import provenance
from q4kit.errors import NotComparableError

BLOCK = {
    "model": {"config_sha256": "c", "weights": "w", "dtype": "bfloat16"},
    "device": {"kind": "cuda", "name": "H200", "driver": "1"},
    "server_args": {"chunked_prefill_size": 4096},
}


def changed(**fields: str) -> dict:
    block = json.loads(json.dumps(BLOCK))
    for name, value in fields.items():
        parent, _, leaf = name.partition("__")
        block[parent][leaf] = value
    return block


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("--model-path /home/user/models/mini --port 1", "--model-path mini --port 1"),
        ("/a/b/c", "c"),
        ("/root", "/root"),
        ("relative/path/x", "relative/path/x"),
        ("http://127.0.0.1/v1/models", "http://127.0.0.1/v1/models"),
        ('{"dir": "/data/ple/table.bin"}', '{"dir": "table.bin"}'),
    ],
)
def test_absolute_paths_are_cut_to_their_last_part(text: str, short: str) -> None:
    assert provenance.short_paths(text) == short


def test_a_block_without_a_server_names_commit_and_machine() -> None:
    block = provenance.collect(None, tool="t")
    assert block["tool"]["name"] == "t"
    assert len(block["tool"]["commit"]) == 40 or block["tool"]["commit"].startswith(provenance.UNKNOWN)
    assert block["machine"]["ram_gib"] > 0


def test_a_folder_without_a_repository_is_unknown_not_an_error(tmp_path: Path) -> None:
    block = provenance.collect(None, root=tmp_path)
    assert block["tool"]["commit"].startswith("unknown: git exit code")


def test_a_copy_without_git_is_still_told_by_its_sources(tmp_path: Path) -> None:
    root = Path(provenance.__file__).parents[1]
    for name in ("q4kit", "tools"):
        shutil.copytree(root / name, tmp_path / name)
    (tmp_path / "pyproject.toml").touch()
    here, copy = (provenance.collect(None, root=place)["tool"] for place in (root, tmp_path))
    assert copy["commit"].startswith(provenance.UNKNOWN)
    assert copy["trees"] == {name: here["trees"][name] for name in ("q4kit", "tools")}
    (tmp_path / "tools" / "bench_speed.py").write_text("pass\n")
    changed = provenance.collect(None, root=tmp_path)["tool"]["trees"]
    assert changed["q4kit"] == here["trees"]["q4kit"]
    assert changed["tools"] != here["trees"]["tools"]


def test_the_disk_of_a_file_is_in_the_machine_block(tmp_path: Path) -> None:
    (tmp_path / "table.bin").write_bytes(b"x")
    files = {"table": tmp_path / "table.bin", "gone": tmp_path / "gone.bin"}
    disks = provenance.collect(None, files=files)["machine"]["disks"]
    assert disks["table"]["filesystem"]
    assert disks["table"]["free_bytes"] > 0
    assert disks["gone"] == "unknown: gone.bin is not on this machine"


def test_the_disk_of_a_checkpoint_is_that_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of a cache holds links: what counts is the disk that they lead to."""
    model, blobs, table = (tmp_path / name for name in ("model", "blobs", "table"))
    for folder in (model, blobs, table):
        folder.mkdir()
    (blobs / "abc").write_bytes(b"x")
    (model / "model.safetensors").symlink_to(blobs / "abc")
    monkeypatch.setattr(provenance.disk, "describe", lambda path: {"device": path.name})
    info = {"model_path": str(model), "ple_offload_dir": str(table)}
    assert provenance._server_disks(info, None) == {"checkpoint": {"device": "abc"}, "table": {"device": "table"}}
    assert provenance._server_disks({**info, "ple_offload_dir": None}, None).keys() == {"checkpoint"}


def test_equal_blocks_are_comparable() -> None:
    assert provenance.check_comparable(BLOCK, changed()) == []


@pytest.mark.parametrize("name", ["model__config_sha256", "model__weights", "model__dtype", "device__name"])
def test_a_strict_field_is_refused_by_name_with_both_values(name: str) -> None:
    dotted = name.replace("__", ".")
    with pytest.raises(NotComparableError, match=rf"{dotted.replace('.', r'[.]')}: .* vs 'other'") as caught:
        provenance.check_comparable(BLOCK, changed(**{name: "other"}))
    assert f"--vary {dotted}" in caught.value.remedy


@pytest.mark.parametrize("vary", ["model", "model.weights"])
def test_a_field_or_its_parent_may_be_named_to_vary(vary: str) -> None:
    provenance.check_comparable(BLOCK, changed(model__weights="other"), vary=[vary])


def test_naming_one_field_does_not_excuse_another_that_begins_alike() -> None:
    with pytest.raises(NotComparableError):
        provenance.check_comparable(BLOCK, changed(model__weights="other"), vary=["model.weight"])


def test_equal_ignorance_is_not_equality() -> None:
    left = right = changed(model__weights="unknown: not on this machine")
    with pytest.raises(NotComparableError, match=r"model\.weights"):
        provenance.check_comparable(left, right)


def test_server_arguments_may_differ_and_are_reported() -> None:
    other = changed(server_args__chunked_prefill_size="64")
    found = provenance.check_comparable(BLOCK, other)
    assert [str(difference) for difference in found] == ["server_args.chunked_prefill_size: 4096 vs '64'"]


def weights(folder: Path, header: dict, body: bytes) -> Path:
    folder.mkdir()
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    return folder


def test_the_weights_fingerprint_sees_header_size_and_ends(tmp_path: Path) -> None:
    body = bytes(range(256)) * 4096
    prints = {
        provenance.weights_fingerprint(weights(tmp_path / "a", {"x": 1}, body)),
        provenance.weights_fingerprint(weights(tmp_path / "b", {"x": 2}, body)),
        provenance.weights_fingerprint(weights(tmp_path / "c", {"x": 1}, body + b"\0")),
        provenance.weights_fingerprint(weights(tmp_path / "d", {"x": 1}, body[:-1] + b"!")),
        provenance.weights_fingerprint(weights(tmp_path / "e", {"x": 1}, b"!" + body[1:])),
    }
    assert len(prints) == 5


def test_a_copy_has_the_same_fingerprint(tmp_path: Path) -> None:
    one, two = (weights(tmp_path / name, {"x": 1}, b"abc" * 999) for name in "ab")
    assert provenance.weights_fingerprint(one) == provenance.weights_fingerprint(two)


def test_a_folder_without_weights_is_unknown(tmp_path: Path) -> None:
    assert provenance.weights_fingerprint(tmp_path).startswith(provenance.UNKNOWN)


def test_secrets_and_volatile_arguments_are_left_out() -> None:
    kept = provenance._server_args(
        {"api_key": "s", "watermark_key_b": "s", "ssl_keyfile": "s", "port": 1, "random_seed": 7, "page_size": 64}
    )
    assert kept == {"page_size": 64}


def test_two_servers_that_start_at_the_same_time_are_two() -> None:
    with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sleep", "60"]) as other:
        try:
            started = [provenance._started(psutil.Process(each.pid)) for each in (one, other, one)]
        finally:
            one.kill()
            other.kill()
    assert started[0] == started[2] != started[1]
    assert started[0].endswith(f"process {one.pid}")
