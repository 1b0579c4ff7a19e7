"""A small package, a series on it, and places to apply it to: real git, real wheels, real environments."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

from q4kit.series import base, export, git, manifest, wheel
from q4kit.series.manifest import Series
from q4kit.series.targets import InstalledTarget

PACKAGE = "q4demo"
VERSION = "1.2.3"
SERIES = "repo/upstream/series-q4head"
BODY = "\n".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(30))

AUTHOR = {
    "GIT_AUTHOR_NAME": git.MAINTAINER,
    "GIT_AUTHOR_EMAIL": git.MAINTAINER_EMAIL,
}


def message(subject: str, finding: str = "1") -> str:
    """Return a commit message with the trailers that the lint asks for."""
    return (
        f"{subject}\n\nMotivation: a test.\nMechanism: a change.\nVerification: this suite.\n\n"
        f"Finding: {finding}\nUpstream-Status: Pending [a test]\n"
        f"Signed-off-by: {git.MAINTAINER} <{git.MAINTAINER_EMAIL}>\n"
    )


def source_files() -> dict[str, str]:
    """Return the package at the pin: path inside site-packages -> text."""
    files = {f"{PACKAGE}/__init__.py": '"""A demo."""\n', f"{PACKAGE}/run.sh": "#!/bin/sh\necho pin\n"}
    for name in ("alpha", "beta", "gamma", "delta"):
        files[f"{PACKAGE}/{name}.py"] = f'"""{name}."""\n\n{BODY}'
    files[f"{PACKAGE}/sub/__init__.py"] = ""
    files[f"{PACKAGE}/sub/deep.py"] = f"# deep\n{BODY}"
    return files


def write_files(root: Path, files: dict[str, str]) -> None:
    """Write the package below ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if name.endswith(".sh") else 0o644)


def make_tests(repo: Path) -> None:
    """Write the tests of the patches and of one regression."""
    folder = repo / "tests" / "patches"
    folder.mkdir(parents=True)
    red = "import pytest\n\npytestmark = pytest.mark.red_on_stock\n\n"
    for name, text in {
        "test_0001_seven.py": red
        + f"def test_seven():\n    from {PACKAGE}.alpha import f7\n\n    assert f7(0) >= 700\n",
        "test_0002_extra.py": red
        + f"def test_eight():\n    from {PACKAGE}.alpha import f8\n\n    assert f8(0) == 800\n",
        "test_0003_sub.py": f"{red}def test_sub():\n    from {PACKAGE}.sub.deep import f3\n\n    assert f3(0) == -3\n",
        "test_0004_more.py": (
            f"import pytest\nfrom {PACKAGE}.alpha import f7\n\n\n@pytest.mark.red_on_stock\n"
            "def test_more():\n    assert f7(0) == 701\n\n\ndef test_both():\n    assert f7(1) > f7(0)\n"
        ),
        "test_regression_nine.py": (f"from {PACKAGE}.alpha import f9\n\n\ndef test_nine():\n    assert f9(0) == 9\n"),
    }.items():
        (folder / name).write_text(text)


def make_wheel(folder: Path, files: dict[str, str], version: str = VERSION) -> Path:
    """Return a wheel that pip can install."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{PACKAGE}-{version}.dist-info"
    extra = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, *extra]) + f"{info}/RECORD,,\n"
    path = folder / f"{PACKAGE}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, **extra, f"{info}/RECORD": record}.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if name.endswith(".sh") else 0o100644) << 16
            archive.writestr(entry, text)
    return path


def commit(root: Path, text: str, when: int) -> None:
    """Commit everything in a work tree with a fixed author and date."""
    git.run(["add", "-A"], root)
    date = {"GIT_AUTHOR_DATE": f"2026-11-01T00:00:{when:02d}+0000"}
    git.run(["commit", "-q", "-m", text, "--allow-empty"], root, env=AUTHOR | date)


def edit(path: Path, old: str, new: str) -> None:
    """Replace text that must occur once."""
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def add_patches(tree: Path) -> None:
    """Commit four patches: an edit, an edit of the same file plus an added package, a mode, an added file."""
    package = tree / "python" / PACKAGE
    edit(package / "alpha.py", "return x + 7\n", "return x + 700\n")
    commit(tree, message("fix(alpha): seven is seven hundred"), 1)
    edit(package / "alpha.py", "return x + 8\n", "return x + 800\n")
    edit(package / "beta.py", "return x + 20\n", "y = x + 20\n    return y\n")
    (package / "extra" / "inner").mkdir(parents=True)
    (package / "extra" / "__init__.py").write_text("")
    (package / "extra" / "inner" / "__init__.py").write_text("VALUE = 1\n")
    commit(tree, message("feat(extra): a package of its own"), 2)
    edit(package / "run.sh", "echo pin\n", "echo patched\n")
    edit(package / "sub" / "deep.py", "return x + 3\n", "return x - 3\n")
    commit(tree, message("fix(sub): minus three"), 3)
    edit(package / "alpha.py", "return x + 700\n", "return x + 701\n")
    (package / "late.py").write_text("LATE = True\n")
    commit(tree, message("fix(alpha): one more"), 4)


@dataclass
class World:
    """Everything a test needs; each test gets its own copies of what it changes."""

    root: Path
    base: Path
    """Work tree of the pin, made like ``fetch`` does."""
    work: Path
    """Work tree with the commits."""
    series: Series

    @property
    def cache(self) -> Path:
        """Cache folder that holds the pinned wheel, so that nothing is downloaded."""
        return self.root / "cache"

    def tree(self, name: str) -> Path:
        """Return a fresh work tree of the pin."""
        dest = self.root / name
        git.run(["clone", "-q", "--no-local", self.base, dest], self.root)
        git.run(["update-ref", base.BASE_REF, "HEAD"], dest)
        return dest

    def environment(self, name: str) -> InstalledTarget:
        """Return the package installed by pip into a fresh virtual environment."""
        return install(self.root / name, make_wheel(self.root / "dist", source_files()))


def install(folder: Path, wheel: Path) -> InstalledTarget:
    """Install a wheel with pip into a new environment at ``folder``."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python3*/site-packages"))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", site, wheel], check=True, capture_output=True)
    return InstalledTarget(str(python), PACKAGE, VERSION, site.resolve())


def make_world(root: Path) -> World:
    """Return a new world below ``root``: the pin, four commits, and the exported series."""
    pin = root / "base"
    write_files(pin / "python", source_files())
    commit_id = base.commit_base(pin, PACKAGE, VERSION)
    tree_id = git.out(["rev-parse", "HEAD^{tree}"], pin)
    tag = wheel.python_tag()
    made = make_wheel(root / "cache" / "wheels" / VERSION / tag, source_files())
    folder = root / SERIES
    folder.mkdir(parents=True)
    (folder / manifest.MANIFEST).write_text(
        f'# a comment that stays\nschema = 1\n\n[base]\nurl = "https://example.org/q4demo"\ntag = "v{VERSION}"\n'
        f'package = "{PACKAGE}"\nversion = "{VERSION}"\ncommit = "{commit_id}"\ntree = "{tree_id}"\n\n'
        f'[base.wheels]\n{tag} = "{wheel.sha256(made)}"\n\n[base.files]\n'
    )
    make_tests(root / "repo")
    work = root / "work"
    git.run(["clone", "-q", "--no-local", pin, work], root)
    git.run(["update-ref", base.BASE_REF, "HEAD"], work)
    add_patches(work)
    export.export(work, series=manifest.load(folder), against=pin)
    with (folder / manifest.MANIFEST).open("a") as f:
        f.write(
            '\n[[regression]]\nfinding = "7"\ntitle = "nine"\n'
            'tests = ["tests/patches/test_regression_nine.py"]\nstock = "pass"\n'
        )
    return World(root, pin, work, manifest.load(folder))


def snapshot(site: Path) -> dict[str, tuple[int, str]]:
    """Return mode and sha256 of every file below a folder, compiled Python left out, and its folders."""
    found: dict[str, tuple[int, str]] = {}
    for path in sorted(site.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[path.relative_to(site).as_posix()] = (path.stat().st_mode, digest)
    return found
