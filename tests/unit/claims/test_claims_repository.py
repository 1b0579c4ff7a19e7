"""The whole check and `add` on real git repositories, and CAMPAIGN's history."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from q4kit.claims import history, repository, writer
from q4kit.claims.ledger import load
from q4kit.errors import UsageError

TOOL = Path(__file__).resolve().parents[3] / "tools" / "claims.py"


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def commit(root: Path, campaign: str) -> None:
    (root / "docs" / "CAMPAIGN.md").write_text(campaign)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "c", "--allow-empty")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    for folder in ("docs", "results", "upstream/series-q4head"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "upstream/series-q4head/series.toml").write_text('[base]\ntag = "v0.5.23"\n')
    (tmp_path / "README.md").write_text("# R\n")
    (tmp_path / "docs/WRITEUP.md").write_text("# W\n")
    (tmp_path / "results/claims.toml").write_text("# the ledger\nschema = 1\n")
    (tmp_path / "results/run.json").write_text(json.dumps({"mean": 12.3456}))
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, "# Log\n\n## 2026-11-29 first\n\ntext\n")
    return tmp_path


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def add(root: Path, claim_id: str = "speed", *more: str) -> subprocess.CompletedProcess[str]:
    return run(
        root, "add", claim_id, "--raw", "results/run.json", "--pointer", "/mean", "--unit", "tok/s",
        "--statement", "a speed", "--campaign", "2026-11-29-first", *more,
    )  # fmt: skip


def test_the_way_of_one_number(repo: Path) -> None:
    """Raw file -> add -> quote -> check; then each link is broken in turn."""
    assert add(repo).returncode == 0
    claim = load(repo / "results/claims.toml").claims["speed"]
    assert (claim.value, claim.base) == (12.35, "v0.5.23")
    assert (repo / "results/claims.toml").read_text().startswith("# the ledger\nschema = 1\n")
    (repo / "docs/WRITEUP.md").write_text("# W\n\n12.3 tok/s [c:speed]\n")
    assert run(repo, "check").returncode == 0

    (repo / "docs/WRITEUP.md").write_text("# W\n\n12.4 tok/s [c:speed]\n")
    done = run(repo, "check")
    assert done.returncode == 1
    assert "'12.4 tok/s' rounds from none of its claims (speed is 12.35 tok/s)" in done.stdout

    (repo / "docs/WRITEUP.md").write_text("# W\n\n12.35 tok/s [c:speed]\n")
    (repo / "results/run.json").write_text(json.dumps({"mean": 12.3457}))
    done = run(repo, "check")
    assert done.returncode == 1
    assert "has sha256" in done.stdout


def test_an_id_is_never_given_twice(repo: Path) -> None:
    assert add(repo).returncode == 0
    done = add(repo)
    assert done.returncode == 2
    assert "'speed' exists already" in done.stderr


def test_a_gpu_figure_says_which_patches_ran(repo: Path) -> None:
    before = (repo / "results/claims.toml").read_bytes()
    done = add(repo, "speed", "--gpu", "H200")
    assert done.returncode == 2
    assert "claim 'speed': a GPU figure of ours needs 'tree'" in done.stderr
    assert (repo / "results/claims.toml").read_bytes() == before
    assert add(repo, "speed", "--gpu", "H200", "--tree", "prefix 21").returncode == 0
    assert load(repo / "results/claims.toml").claims["speed"].tree == "prefix 21"


def test_raw_files_live_in_results(repo: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lies outside results/"):
        writer.entry_from_raw(repo, "x", tmp_path / "README.md", "/a", unit="ms", statement="s", campaign="c", base="b")


def test_numbers_of_patch_messages_are_checked(repo: Path) -> None:
    patch = "From 0\nSubject: [PATCH] fix: x\n\n33 % faster.\n\n---\n f | 1 +\n"
    (repo / "upstream/series-q4head/0001-x.patch").write_text(patch)
    done = run(repo, "check")
    assert done.returncode == 1
    assert "0001-x.patch:1: '33 %' has no claim" in done.stdout


def test_campaign_that_grew_holds(repo: Path) -> None:
    commit(repo, "# Log\n\n## 2026-11-29 first\n\ntext\n\n## 2026-11-30 second\n")
    checked = repository.check(repo)
    assert checked.findings == []
    assert checked.campaign_versions == 2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# Log\n\n## 2026-11-29 first\n\nbetter text\n", 5),
        ("# Log\n\n## 2026-11-28 earlier\n\n## 2026-11-29 first\n\ntext\n", 3),
        ("# Log\n", 2),
    ],
)
def test_campaign_that_was_rewritten_is_found(repo: Path, text: str, line: int) -> None:
    commit(repo, text)
    findings = [str(f) for f in repository.check(repo).findings]
    assert len(findings) == 1
    assert f"line {line} of " in findings[0]


def test_rewriting_in_the_work_tree_is_found_before_the_commit(repo: Path) -> None:
    (repo / "docs/CAMPAIGN.md").write_text("# Log\n\nnew\n")
    assert "docs/CAMPAIGN.md in work tree: line 3" in str(repository.check(repo).findings[0])


def test_a_rewrite_that_was_put_back_is_still_found(repo: Path) -> None:
    first = (repo / "docs/CAMPAIGN.md").read_text()
    commit(repo, "# Log\n\nchanged\n")
    commit(repo, first)
    assert len(repository.check(repo).findings) == 2


def test_deleted_campaign_is_found(repo: Path) -> None:
    git(repo, "rm", "-q", "docs/CAMPAIGN.md")
    git(repo, "commit", "-qm", "gone")
    assert history.versions(history.git_in(repo), "docs/CAMPAIGN.md")[-1][1] == b""
    assert repository.check(repo).findings


def test_no_ledger_is_a_usage_error(repo: Path) -> None:
    (repo / "results/claims.toml").unlink()
    done = run(repo, "check")
    assert done.returncode == 2
    assert "no ledger at claims.toml" in done.stderr


def test_shallow_clone_says_what_it_could_not_see(repo: Path, tmp_path: Path) -> None:
    commit(repo, "# Log\n\n## 2026-11-29 first\n\ntext\n\nmore\n")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{repo}", str(clone)], check=True)
    done = run(clone, "check")
    assert done.returncode == 0
    assert "shallow clone" in done.stdout
