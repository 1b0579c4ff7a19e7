#!/usr/bin/env python3
"""The published table's geometry on a small disk: 320,001,536 rows of 160 bytes, 51.2 GB, as a sparse flat file.

A tiny checkpoint is made whose configuration declares the full table and whose shards are left out; the server reads
the flat file (``--ple-offload-dir``). Three servers: two over a table of holes (zeros), one over a table in which the
rows of one prompt are planted, only those past the first 4 GiB. Checked: all serve with memory far below the table's
size; the planted prompt's logprobs move, another prompt's do not: bit for bit where servers repeat themselves and each
other, else within twice the floor, the largest difference between two runs of one server and between the two alike (on
a GPU each process tunes its kernels for itself).

``python tests/gpu/full_table.py FOLDER`` makes model and tables in FOLDER (a few MB) and serves; one JSON line a case,
exit 1 if one does not hold, 4 for a server or environment fault. ``--table-only ROW_FOLDER`` writes just a table of
holes, for `tests/gpu/ple_nvme.py --table` or a hand-made server.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import random
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from q4kit.errors import EnvironmentFault, Q4Error
from q4kit.server.client import Client
from q4kit.server.launch import ServerProcess, launch
from q4kit.tinymodel import PRESETS, generate
from q4kit.tinymodel.options import PLE_FP8_SCALE
from tests.gpu import records
from tests.gpu.cells import GRAPH_ARGS
from tests.gpu.matrix import COMMON_ARGS, worst
from tests.gpu.matrix import generate as ask
from tests.gpu.memory_trend import group_memory

ROWS, ROW_BYTES, HEADS = 320_001_536, 160, 16
BASE = 20_000_000
"""ngram_vocab_size_base of the published checkpoint: 16 primes from here on, padded to 128, give ROWS."""
FAR = 1 << 32
"""Bytes: an offset that 32 bits cannot hold."""
DROPPED = (".ngram_embedding.shard_", ".ngram_heads_offsets", ".ngram_heads_vocab_sizes")
MEMORY_LIMIT_MIB = 16_384


def write_sparse_table(folder: Path, planted: Mapping[int, bytes], rows: int = ROWS) -> Path:
    """Write a flat table of `rows` rows of zeros, with `planted` rows (id -> bytes), and return its data file.

    Only what is planted takes disk space; EnvironmentFault where the file system keeps no holes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "table.bin"
    try:
        with path.open("wb") as out:
            out.truncate(rows * ROW_BYTES)
            for row, content in sorted(planted.items()):
                if len(content) != ROW_BYTES or not 0 <= row < rows:
                    raise ValueError(f"row {row} of {len(content)} bytes in a table of {rows} rows of {ROW_BYTES}")
                os.pwrite(out.fileno(), content, row * ROW_BYTES)
            os.fsync(out.fileno())
            taken = os.fstat(out.fileno()).st_blocks * 512
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.ENOSPC, errno.EINVAL, errno.EDQUOT):
            raise
        path.unlink(missing_ok=True)
        raise EnvironmentFault(
            f"{folder}: a sparse file of {rows * ROW_BYTES} bytes cannot be made here ({error.strerror})",
            remedy="use a folder on ext4, xfs, btrfs or tmpfs",
        ) from error
    if taken > 64 * 1024 * (len(planted) + 64):
        path.unlink()
        raise EnvironmentFault(
            f"{folder}: the file system keeps no holes ({taken} bytes taken)",
            remedy="use a folder on ext4, xfs, btrfs or tmpfs",
        )
    description = {
        "format": "ple-flat", "version": 1, "file": path.name, "rows": rows, "dim": ROW_BYTES,
        "dtype": "float8_e4m3fn", "weight_scale": PLE_FP8_SCALE,
    }  # fmt: skip
    (folder / "ple.json").write_text(json.dumps(description))
    return path


def declare_full_table(folder: Path) -> None:
    """Make a generated checkpoint declare the full table, and drop its own small one."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["ngram_vocab_size_base"] = BASE
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weight_map: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        kept = {name: t for name, t in load_file(path).items() if not any(part in name for part in DROPPED)}
        path.unlink()
        if kept:
            save_file(kept, path, {"format": "pt"})
            weight_map |= dict.fromkeys(kept, path.name)
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def make_model(folder: Path, preset: str) -> Path:
    """Generate a checkpoint with rows of 160 fp8 bytes that declares the full table; kept where it is there already."""
    if not (folder / "config.json").is_file():
        options = dataclasses.replace(
            PRESETS[preset], ple_embed_dim=ROW_BYTES * HEADS, ple_layers=(2,), ple_dtype="float8_e4m3fn"
        )
        half = folder.with_name(f"{folder.name}.part")  # a run that ends here leaves no checkpoint that looks whole
        shutil.rmtree(half, ignore_errors=True)
        generate(half, options)
        declare_full_table(half)
        half.rename(folder)
    return folder


def row_ids(model: Path, tokens: list[int]) -> np.ndarray:
    """Return the row ids of a prompt, int64 [tokens, HEADS], by the patched SGLang's own host hash."""
    import torch
    from safetensors import safe_open
    from sglang.srt.models import qwen4_exp

    config = json.loads((model / "config.json").read_text())["text_config"]
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name in index if name.endswith(".ple_embedding.layer_multipliers"))
    with safe_open(model / index[name], "pt") as tensors:
        multipliers = tensors.get_tensor(name)
    kind = qwen4_exp.Qwen4ExpNGramEmbedding
    ple = kind.__new__(kind)
    torch.nn.Module.__init__(ple)
    ple.ngram_size, ple.heads_per_ngram, ple.ngram_heads, ple.ple_layer_index = 3, 8, HEADS, 0
    ple.ngram_vocab_size_base, ple.eos_token_id = BASE, config["eos_token_id"]
    sizes, offsets, total = ple._build_head_vocab_and_offsets()
    padded = -(-total // 128) * 128
    if padded != ROWS:
        raise ValueError(f"this geometry has {padded} rows, expected {ROWS}")
    ple._host_hash_buffers = (multipliers, torch.tensor(sizes), torch.tensor(offsets))
    history = [ple.eos_token_id, ple.eos_token_id, *tokens]
    contexts = torch.tensor([history[i : i + 3] for i in range(len(tokens))])
    return ple.hash_contexts_on_host(contexts).numpy()


def far_rows(ids: np.ndarray, seed: int = 0) -> dict[int, bytes]:
    """Return random finite fp8 rows for the ids whose offsets need more than 32 bits."""
    rng = np.random.default_rng(seed)
    rows = {}
    for row in np.unique(ids[ids * ROW_BYTES >= FAR]):
        content = rng.integers(0, 0x7F, ROW_BYTES, dtype=np.uint8)  # 0x7f is NaN
        rows[int(row)] = (content | (rng.integers(0, 2, ROW_BYTES, dtype=np.uint8) << 7)).astype(np.uint8).tobytes()
    return rows


def judge(holes: dict[str, Any], again: dict[str, Any], planted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cases of three servers' records; `again` is of the same table as `holes`."""
    cases = []
    for prompt, moves in (("planted", True), ("other", False)):
        alike = [record[prompt] for record in (holes, again, planted)] + [(holes[prompt][0], again[prompt][0])]
        floor = max(worst([one], [other])[0] for one, other in alike)
        moved = worst([holes[prompt][0]], [planted[prompt][0]])[0]
        cases.append(
            {
                "case": f"{prompt} prompt",
                "max_abs_dlogprob": moved,
                "floor": floor,
                "ok": (moved > 2 * floor) is moves,
            }
        )
    for name, record in (("holes", holes), ("again", again), ("planted", planted)):
        finite = bool(np.isfinite([p for answers in (record["planted"], record["other"]) for a in answers
                                   for p in (*a["prompt"], *a["output"])]).all())  # fmt: skip
        cases.append(
            {
                "case": f"{name} server",
                "finite": finite,
                "rss_mib": record["rss_mib"],
                "table_mib": ROWS * ROW_BYTES >> 20,
                "ok": finite and record["rss_mib"] < MEMORY_LIMIT_MIB,
            }
        )
    return cases


def measure(server: ServerProcess, prompts: dict[str, list[int]]) -> dict[str, Any]:
    """Return two answers to each prompt and the server's memory."""
    record: dict[str, Any] = {}
    with Client(server.base_url, timeout_s=120) as client:
        for name, ids in prompts.items():
            record[name] = []
            for _ in range(2):
                client.flush_cache()
                record[name].append(ask(client, ids, 4))
    record["rss_mib"] = round(sum(process["rss"] for process in group_memory(server.pid).values()), 1)
    return record


def serve(args: argparse.Namespace, model: Path, tables: dict[str, Path], prompts: dict[str, list[int]]) -> Any:
    """Return the record of a server over each table; side by side on a GPU."""
    flags = ["--ple-offload-embedding", "--ple-offload-backend=nvme", *args.arg]
    if args.device == "cuda":
        flags += [*COMMON_ARGS, *GRAPH_ARGS[args.graphs]]
    else:
        flags.append('--json-model-override-args={"language_model_only": true}')

    def one(name: str) -> dict[str, Any]:
        with launch(
            model, python=sys.executable, pythonpath=args.patched, log_path=args.folder / f"{name}.log",
            extra_args=[*flags, f"--ple-offload-dir={tables[name]}"], timeout_s=400, device=args.device,
        ) as server:  # fmt: skip
            return measure(server, prompts)

    with ThreadPoolExecutor(len(tables) if args.device == "cuda" else 1) as pool:
        return dict(zip(tables, pool.map(one, tables), strict=True))


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every case holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model, tables and logs go")
    parser.add_argument("--patched", type=Path, help="folder with the patched sglang package (default: as installed)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--graphs", choices=tuple(GRAPH_ARGS), default="full", help="CUDA graphs (cuda only)")
    parser.add_argument("--json", type=Path, help="write the cases there too")
    parser.add_argument("--arg", action="append", default=[], help="one more server argument")
    parser.add_argument("--table-only", action="store_true", help="write a table of holes into FOLDER, serve nothing")
    args = parser.parse_args(argv)
    try:
        if args.table_only:
            print(write_sparse_table(args.folder, {}))
            return 0
        if args.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise EnvironmentFault(
                    "needs an NVIDIA GPU: torch.cuda.is_available() is False",
                    remedy="run it on one, or on the reference platform with --device cpu",
                )
        else:
            os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")
        if args.patched:
            sys.path.insert(0, str(args.patched))
        model = make_model(args.folder / "model", "gpu" if args.device == "cuda" else "mini")
        rng = random.Random(5)
        prompts = {name: [rng.randrange(3, 500) for _ in range(40)] for name in ("planted", "other")}
        rows = far_rows(row_ids(model, prompts["planted"]))
        tables = {"holes": args.folder / "holes", "again": args.folder / "holes", "planted": args.folder / "rows"}
        write_sparse_table(tables["holes"], {})
        write_sparse_table(tables["planted"], rows)
        series = {"series": records.series(args.patched)}
        results = [result | series for result in judge(**serve(args, model, tables, prompts))]
    except Q4Error as error:
        print(f"error: {error}\nremedy: {error.remedy}", file=sys.stderr)
        return 4
    finally:
        for name in ("holes", "rows"):
            with contextlib.suppress(OSError):
                (args.folder / name / "table.bin").unlink()
    for result in results:
        print(json.dumps(result), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
