"""Provenance: what was measured, with what, on what; and which of it two measurements must share.

`collect` never fails because something cannot be found out: the field then reads "unknown: <why>",
and an unknown field never counts as equal to anything. Absolute paths are cut to their last
component, so a result file can be published without telling where its author keeps things.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import psutil

from q4kit.errors import NotComparableError, Q4Error
from q4kit.ple import disk
from q4kit.server.client import Client
from q4kit.versions import source_version, version_of

SCHEMA = 1
UNKNOWN = "unknown: "

STRICT_FIELDS: tuple[str, ...] = (
    "model.config_sha256",
    "model.weights",
    "model.dtype",
    "device.kind",
    "device.name",
)
"""Fields that must be equal unless the caller names them (or a parent) in `vary`."""

REPORTED_FIELDS: tuple[str, ...] = (
    "series",
    "sglang.version",
    "server_args",
    "server_env",
    "packages",
    "device",
    "machine.cpu",
    "machine.kernel",
)
"""Fields that may differ; differences are listed beside every comparison."""

_VOLATILE_ARGS = frozenset(
    {
        "host",
        "port",
        "nccl_port",
        "grpc_port",
        "random_seed",
        "dist_init_addr",
        "launch_command",
        "startup_time",
        "internal_states",
        "status",
        "model_path",
        "tokenizer_path",
        "served_model_name",
        "version",
        "frontend",
        "kv_events",
        "log_level",
        "log_level_http",
        "gated_launch_port",
    }
)
"""Server arguments that differ between two starts of the same configuration, or are kept elsewhere."""
_SECRET = re.compile(r"key|token$|secret|password|credential|ssl_", re.IGNORECASE)
_ENV_KEPT = re.compile(r"^(SGLANG|SGL|TORCH[A-Z]*|PYTORCH|CUDA|NCCL|TRITON|FLASHINFER|OMP|MKL)_")
_ABSOLUTE_PATH = re.compile(r"(?<![\w.~/])/(?:[^\s/'\":;,=]+/)+([^\s/'\":;,=]+)")
_PACKAGES = (
    "sglang",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "flashinfer-python",
    "sglang-kernel",
    "sglang-cpu-ref",
    "numpy",
)
_SOURCES = ("q4kit", "tools", "tests/gpu")
"""Folders of this repository that hold code which measures."""
_SOURCE_SUFFIXES = (".py", ".sh")
_LOOPBACK = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}
_CLOCK_SLACK_S = 2.0
"""A process's start is known to the clock tick, and since boot: file times may seem this much later."""
_SAMPLE_BLOCKS = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Difference:
    """One field on which two provenance blocks disagree."""

    field: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.left!r} vs {self.right!r}"


def collect(
    client: Client | None,
    *,
    root: Path | None = None,
    tool: str = "",
    package: Path | None = None,
    files: Mapping[str, Path] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the provenance block of a measurement made now.

    Args:
        client: the server measured; None for a computation without one.
        root: work tree whose commit is recorded; by default the one this package lies in.
        tool: name of the calling tool.
        package: without a server, the folder of the sglang package that was imported.
        files: what else is read while measuring ("table"): `machine.disks` says which disk holds each, beside the
            checkpoint and the table directory of a local server.
    """
    block: dict[str, Any] = {
        "schema": SCHEMA,
        "tool": {"name": tool, **_repo_state(root or Path(__file__).resolve().parent.parent)},
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "machine": _machine() | {"disks": {name: _disk(path) for name, path in files.items()}},
    }
    if client is None:
        if package is not None:
            series = series_of(package) | {"of": "the imported package"}
            block |= {"sglang": {"version": series["version"]}, "series": series}
        return block
    info = _attempt(client.server_info)
    model = _attempt(client.model_info)
    process = _server_process(client.base_url)
    if not isinstance(info, dict):
        info = {"version": info}
    block["sglang"] = {"version": info.get("version", f"{UNKNOWN}not reported by the server")}
    block["server_args"] = _server_args(info)
    block["launch_command"] = short_paths(str(info.get("launch_command", f"{UNKNOWN}not reported")))
    block["server_env"] = _server_env(process)
    block["packages"] = _packages(process)
    block["server_started"] = _started(process)
    block["series"] = _series(process)
    block["model"] = _model(info, model)
    local = _is_loopback(client.base_url)
    block["device"] = _device(str(info.get("device", "")), local)
    if local:
        block["machine"]["disks"] = _server_disks(info, model) | block["machine"]["disks"]
    return block


def series_of(package_dir: Path | str) -> dict[str, Any]:
    """Return which SGLang a package's folder (``.../sglang``) holds, by its files alone, as plain JSON types.

    Neither git nor an installation is needed and nothing is imported, so it answers for a tree on PYTHONPATH too.
    Keys: `patches` (number of patches of this repository's series, None where the files are those of no prefix;
    `reason` says what differs), `state`, `length` and `id` of the series, `tree` (git tree id of the touched files),
    `python_sha256` and `python_files` (all ``.py`` files of the package) and `version`. What cannot be found out reads
    "unknown: <why>". About 0.4 s when the files are in the page cache.
    """
    package = Path(package_dir)
    if not (package / "__init__.py").is_file():
        why = f"{UNKNOWN}no Python package in {package.name}"
        names = ("state", "length", "id", "tree", "version", "python_sha256", "python_files")
        return {"patches": None, **dict.fromkeys(names, why), "reason": why}
    identity = importlib.import_module("q4kit.series.identity")
    manifest = importlib.import_module("q4kit.series.manifest")
    try:
        found: dict[str, Any] = identity.identify(package, manifest.load())
    except (Q4Error, OSError) as error:
        why = f"{UNKNOWN}{short_paths(str(error))[:200]}"
        found = {"patches": None, **dict.fromkeys(("state", "length", "id", "tree"), why)}
        found |= {"version": source_version(package), "reason": why}
    hashed = _attempt(lambda: identity.python_hash(package))
    digest, count = hashed if isinstance(hashed, tuple) else (hashed, hashed)
    return found | {"python_sha256": digest, "python_files": count}


def get(block: Mapping[str, Any], name: str) -> Any:
    """Return the value at a dotted field name; None when it is absent."""
    value: Any = block
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def differences(
    left: Mapping[str, Any], right: Mapping[str, Any], fields: Iterable[str] = STRICT_FIELDS + REPORTED_FIELDS
) -> list[Difference]:
    """Return every leaf under `fields` on which the two blocks disagree, in field order.

    A field that either side could not find out is a disagreement: equal ignorance proves nothing.
    """
    found: dict[str, Difference] = {}
    for name in fields:
        for difference in _compare(name, get(left, name), get(right, name)):
            found.setdefault(difference.field, difference)
    return list(found.values())


def check_comparable(
    left: Mapping[str, Any],
    right: Mapping[str, Any],
    *,
    vary: Iterable[str] = (),
    strict: Iterable[str] = STRICT_FIELDS,
) -> list[Difference]:
    """Return the differences that are allowed; raise on those that are not.

    Args:
        left, right: provenance blocks.
        vary: dotted names (or parents, "model" covers "model.weights") that are meant to differ.
        strict: fields that must be equal otherwise.

    Raises:
        NotComparableError: naming every strict field that differs, both values, and the remedy.
    """
    allowed = tuple(vary)
    bad = [
        difference
        for difference in differences(left, right, strict)
        if not any(difference.field == name or difference.field.startswith(name + ".") for name in allowed)
    ]
    if bad:
        raise NotComparableError(
            "the two measurements differ in " + "; ".join(str(difference) for difference in bad),
            remedy="Measure both sides alike, or name what is meant to differ: "
            + " ".join(f"--vary {difference.field}" for difference in bad),
        )
    return differences(left, right)


def short_paths(text: str) -> str:
    """Return `text` with every absolute path cut to its last component."""
    return _ABSOLUTE_PATH.sub(r"\1", text)


def sha256_file(path: Path) -> str:
    """Return the hex sha256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@functools.lru_cache(maxsize=32)
def weights_fingerprint(folder: Path) -> str:
    """Return a hash over names, sizes, headers and 64 sampled blocks of every weight file.

    Reading a 60 GB checkpoint whole takes minutes, so content is sampled (64 x 4 KiB a file, evenly
    spaced, both ends included): another checkpoint, dtype, shard layout or quantisation always
    changes it; a few changed weights in between may not.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return f"{UNKNOWN}no *.safetensors in the model folder"
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as stream:
            header_size = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header_size, size)))
            step = max((size - _SAMPLE_BYTES) // (_SAMPLE_BLOCKS - 1), _SAMPLE_BYTES)
            for offset in range(0, size, step):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(size - _SAMPLE_BYTES, 0))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


# -- the parts of the block ---------------------------------------------------------------------


def _attempt(call: Callable[[], Any]) -> Any:
    """Return the call's result, or "unknown: why" when it fails in an expected way."""
    try:
        return call()
    except (Q4Error, OSError, ValueError, KeyError, LookupError, subprocess.SubprocessError) as error:
        return f"{UNKNOWN}{short_paths(str(error))[:200]}"


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{command[0]} exit code {done.returncode}: {done.stderr.strip()[:120]}")
    return done.stdout.strip()


def _repo_state(root: Path) -> dict[str, Any]:
    commit = _attempt(lambda: _run("git", "rev-parse", "HEAD", cwd=root))
    dirty = _attempt(lambda: bool(_run("git", "status", "--porcelain", "--untracked-files=no", cwd=root)))
    return {"version": version_of("q4kit"), "commit": commit, "dirty": dirty, "trees": _source_trees(root)}


def _source_trees(root: Path) -> dict[str, str]:
    """Return git's tree id of each source folder as it is: `git rev-parse COMMIT:FOLDER` finds its commit.

    A copy without git is identified by it, and so is a changed work tree.
    """
    identity = importlib.import_module("q4kit.series.identity")
    folders = _SOURCES if (root / "pyproject.toml").is_file() else _SOURCES[:1]
    return {
        name: _attempt(functools.partial(identity.folder_tree, root / name, _SOURCE_SUFFIXES))
        for name in folders
        if (root / name).is_dir()
    }


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _disk(path: Path) -> dict[str, str | int] | str:
    """Return which disk a path lies on; of a model folder the disk of its weights, which may be links."""
    weights = sorted(path.glob("*.safetensors"))[:1] if path.is_dir() else []
    place = (weights or [path])[0].resolve()
    if not place.exists():
        return f"{UNKNOWN}{path.name} is not on this machine"
    found: dict[str, str | int] | str = _attempt(lambda: disk.describe(place))
    return found


def _server_disks(info: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the disk of the checkpoint, and that of the n-gram table where it has a directory of its own."""
    found = {}
    if path := _model_path(info, model):
        found["checkpoint"] = _disk(Path(path))
    if isinstance(table := info.get("ple_offload_dir"), str):
        found["table"] = _disk(Path(table))
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _is_loopback(base_url: str) -> bool:
    return (urlsplit(base_url).hostname or "") in _LOOPBACK


def _server_process(base_url: str) -> psutil.Process | str:
    """Return the process that listens on a loopback URL, or why it cannot be told."""
    if not _is_loopback(base_url):
        return f"{UNKNOWN}the server runs on another machine"
    port = urlsplit(base_url).port or 80
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
                and connection.pid is not None
            ):
                return psutil.Process(connection.pid)
    except psutil.Error as error:
        return f"{UNKNOWN}{error}"
    return f"{UNKNOWN}no visible process listens on port {port}"


def _server_args(info: Mapping[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for name, value in info.items():
        if name in _VOLATILE_ARGS or name.startswith("_") or _SECRET.search(name):
            continue
        args[name] = short_paths(value) if isinstance(value, str) else value
    return args


def _server_env(process: psutil.Process | str) -> dict[str, str] | str:
    if isinstance(process, str):
        return process
    try:
        environment = process.environ()
    except psutil.Error as error:
        return f"{UNKNOWN}{error}"
    return {
        name: short_paths(value)
        for name, value in sorted(environment.items())
        if _ENV_KEPT.match(name) and not _SECRET.search(name)
    }


def _started(process: psutil.Process | str) -> str:
    """Return when the server's process began and its id: they tell a restart from a repeat, also side by side."""
    if isinstance(process, str):
        return process
    try:
        began = datetime.fromtimestamp(process.create_time(), UTC).isoformat(timespec="milliseconds")
        return f"{began}, process {process.pid}"
    except psutil.Error as error:
        return f"{UNKNOWN}{error}"


def _server_python(process: psutil.Process) -> tuple[str, list[Path]]:
    """Return the interpreter of the server and the folders before its packages: for -m its own, then PYTHONPATH."""
    command, environment, folder = process.cmdline(), process.environ(), Path(process.cwd())
    path = [folder / entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if "-m" in command[1:] and "PYTHONSAFEPATH" not in environment:
        path.insert(0, folder)
    first = command[0] if command else ""
    if not Path(first).name.startswith("python"):
        return process.exe(), path
    return str(folder / first) if "/" in first else shutil.which(first) or process.exe(), path


def _packages(process: psutil.Process | str) -> dict[str, str] | str:
    """Return the versions of the packages that decide the numbers, in the server's environment."""
    if isinstance(process, str):
        return process

    def ask() -> Any:
        python, _ = _server_python(process)
        program = (
            "import importlib.metadata as m, json\n"
            "def v(n):\n"
            "    try: return m.version(n)\n"
            "    except m.PackageNotFoundError: return None\n"
            f"print(json.dumps({{n: v(n) for n in {_PACKAGES!r}}}))"
        )
        return {name: value for name, value in json.loads(_run(python, "-c", program)).items() if value}

    try:
        result: dict[str, str] | str = _attempt(ask)
    except psutil.Error as error:
        return f"{UNKNOWN}{error}"
    return result


# Locates the package that the server's interpreter imports, without importing it.
_LOCATE = (
    "import importlib.util as u\n"
    "spec = u.find_spec('sglang')\n"
    "print((list(spec.submodule_search_locations or []) if spec else [])[0])"
)


def server_package(process: psutil.Process) -> Path:
    """Return the folder of the sglang package that a server imports; OSError where its interpreter finds none."""
    python, path = _server_python(process)
    for entry in path:
        if (entry / "sglang" / "__init__.py").is_file():
            return entry / "sglang"
    return Path(_run(python, "-E", "-P", "-c", _LOCATE))


def _series(process: psutil.Process | str) -> dict[str, Any] | str:
    """Return what the code that the server runs contains of the patch series."""
    if isinstance(process, str):
        return process
    try:
        package = _attempt(lambda: server_package(process))
    except psutil.Error as error:
        return f"{UNKNOWN}{error}"
    if not isinstance(package, Path):
        return str(package)
    state = series_of(package)
    state |= _recorded_state(package, process, state)
    state |= _touched_since_start(package, process)
    state["prefix"] = -1 if state["patches"] is None else state["patches"]
    state["of"] = "the server's code"
    return {name: short_paths(value) if isinstance(value, str) else value for name, value in state.items()}


def _recorded_state(package: Path, process: psutil.Process, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `series.py status` adds: an interrupted apply, absorbed patches, a record that contradicts.

    It knows work trees and installed packages; for any other folder the files are all there is to go by.
    """
    series = importlib.import_module("q4kit.series")
    try:
        if package.parent.name == "python" and (package.parents[1] / ".git").exists():
            status = series.status(package.parents[1])
        elif package.parent.name in ("site-packages", "dist-packages"):
            target = series.installed_target(_server_python(process)[0])
            if Path(target.site, "sglang").resolve() != package.resolve():
                return {}
            status = series.status(target)
        else:
            return {}
    except (Q4Error, OSError, psutil.Error):
        return {}
    known = {"state": status.state, "absorbed": status.absorbed}
    if status.state in ("clean", "applied"):
        return known
    return known | {"patches": None, "reason": status.reason or found["reason"]}


def _touched_since_start(package: Path, process: psutil.Process) -> dict[str, Any]:
    """Return that nothing is known of what runs, where a file of the series was written after the server's start."""
    identity = importlib.import_module("q4kit.series.identity")
    manifest = importlib.import_module("q4kit.series.manifest")
    try:
        when, name = identity.newest(package, manifest.load())
        late = when > process.create_time() + _CLOCK_SLACK_S
    except (Q4Error, OSError, psutil.Error):
        return {}
    if not late:
        return {}
    reason = f"{UNKNOWN}{name} was written after the server had started"
    return {"state": reason, "patches": None, "reason": reason}


def _model_path(info: Mapping[str, Any], model: Any) -> str:
    return str((model.get("model_path") if isinstance(model, dict) else None) or info.get("model_path") or "")


def _model(info: Mapping[str, Any], model: Any) -> dict[str, Any]:
    path = _model_path(info, model)
    block: dict[str, Any] = {"name": Path(path).name, "dtype_argument": info.get("dtype")}
    snapshot = re.search(r"/snapshots/([0-9a-f]{40})", path)
    block["revision"] = snapshot[1] if snapshot else info.get("revision")
    folder = Path(path)
    if not (folder / "config.json").is_file():
        reason = f"{UNKNOWN}the model folder is not on this machine"
        return block | dict.fromkeys(("config_sha256", "dtype", "weights", "tokenizer_sha256"), reason)
    config = json.loads((folder / "config.json").read_text())
    text_config = config.get("text_config") or {}
    block["config_sha256"] = sha256_file(folder / "config.json")
    block["architecture"] = (config.get("architectures") or [None])[0]
    block["dtype"] = config.get("dtype") or config.get("torch_dtype") or text_config.get("dtype")
    block["vocab_size"] = config.get("vocab_size") or text_config.get("vocab_size")
    block["quantization"] = (config.get("quantization_config") or {}).get("quant_method")
    block["weights"] = _attempt(lambda: weights_fingerprint(folder))
    tokenizer = folder / "tokenizer.json"
    block["tokenizer_sha256"] = sha256_file(tokenizer) if tokenizer.is_file() else f"{UNKNOWN}no tokenizer.json"
    return block


_GPU_QUERY = {
    "name": "name",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "power_limit_w": "power.limit",
    "sm_clock_max_mhz": "clocks.max.sm",
    "pcie_gen": "pcie.link.gen.current",
    "pcie_width": "pcie.link.width.current",
    "compute_capability": "compute_cap",
}


def _device(kind: str, local: bool) -> dict[str, Any]:
    if not local:
        reason = f"{UNKNOWN}the server runs on another machine"
        return {"kind": kind or reason, "name": reason}
    if kind == "cpu":
        return {"kind": kind, "name": _cpu_name()}
    fields = ",".join(_GPU_QUERY.values())
    answer = _attempt(lambda: _run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines())
    if not isinstance(answer, list) or not answer:
        return {
            "kind": kind or f"{UNKNOWN}not reported",
            "name": answer or f"{UNKNOWN}nvidia-smi lists no GPU",
        }
    first = [part.strip() for part in answer[0].split(",")]
    return {"kind": kind, "count": len(answer), **dict(zip(_GPU_QUERY, first, strict=False))}


def _compare(name: str, left: Any, right: Any) -> list[Difference]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        keys = dict.fromkeys([*left, *right])
        return [difference for key in keys for difference in _compare(f"{name}.{key}", left.get(key), right.get(key))]
    unknown = any(isinstance(side, str) and side.startswith(UNKNOWN) for side in (left, right))
    return [Difference(name, left, right)] if unknown or left != right else []
