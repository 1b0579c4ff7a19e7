#!/usr/bin/env python3
"""What a result belongs to: one hash over SGLang trees, checkpoints, scripts and options.

`inputs.py PATH... [--options WORDS]` prints it: run_all.sh keeps it with each step, matrix.py with each cell, and what
has another one is measured again. A path that is not there counts as absent, a script stands for the modules of this
folder that it imports too.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from q4kit import provenance


def fingerprint(paths: Sequence[Path], options: Sequence[str] = ()) -> str:
    """Return the hash of what `paths` hold, wherever they lie, and of `options`, both in order."""
    digest = hashlib.sha256()
    for part in [*map(_content, paths), *options]:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def with_modules(script: Path) -> list[Path]:
    """Return `script` and the modules of its own folder that it imports, directly or not, sorted after it."""
    found: set[Path] = set()
    todo = [script]
    while todo:
        path = todo.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.gpu"):
                names = [alias.name for alias in node.names] if node.module == "tests.gpu" else [node.module or ""]
                todo += [script.with_name(f"{name.rpartition('.')[2]}.py") for name in names]
    return [script, *sorted(found - {script})]


def _content(path: Path) -> str:
    if path.is_file():
        return f"file {provenance.sha256_file(path)}"
    if (path / "config.json").is_file():
        weights = provenance.weights_fingerprint(path.resolve())
        return f"checkpoint {provenance.sha256_file(path / 'config.json')} {weights}"
    if (path / "sglang").is_dir():
        return f"tree {_package(path / 'sglang')}"
    return "absent"


def _package(folder: Path) -> str:
    """Return the hash of a package's files and their names, byte code left out."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(folder)}\0{provenance.sha256_file(file)}\0".encode())
    return digest.hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Print the hash; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH")
    parser.add_argument("--options", default="", metavar="WORDS", help="what else decides the result, one string")
    args = parser.parse_args(argv)
    paths = [each for path in args.paths for each in (with_modules(path) if path.suffix == ".py" else [path])]
    print(fingerprint(paths, args.options.split()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
