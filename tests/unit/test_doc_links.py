"""Links between the documents resolve, and what a document lists from a patch is what the patch has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from q4kit.claims.check import heading_anchors

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "cpu_platform" / "README.md", *(ROOT / "docs").glob("*.md")]
)
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"^    .*$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(document: Path) -> list[str]:
    """Return the anchors of a document's headings."""
    return heading_anchors(_FENCED.sub("", document.read_text(encoding="utf-8")))


def broken_links(document: Path) -> list[str]:
    """Return the links of a document to files or headings of the repository that are not there."""
    text = _INDENTED.sub("", _FENCED.sub("", document.read_text(encoding="utf-8")))
    broken = []
    for link in _LINK.findall(text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    assert broken_links(document) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading: with marks\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](other.md#a-heading-with-marks) [b](#top) [c](https://example.org/x#y)\n"
        "[d](gone.md) [e](other.md#gone) [f](#gone)\n\n    [code](not/a/link)\n"
    )
    assert broken_links(page) == ["gone.md", "other.md#gone", "#gone"]


def test_the_glossary_is_one_click_from_the_readme() -> None:
    assert "docs/GLOSSARY.md" in _LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_serving_lists_the_counters_of_the_patch() -> None:
    (patch,) = (ROOT / "upstream" / "series-q4head").glob("*-report-the-rows-read-from-storage.patch")
    added = patch.read_text(encoding="utf-8")
    block = re.search(r"^\+PLE_READ_STATS = \{\n(.*?)^\+\}", added, re.DOTALL | re.MULTILINE)
    assert block is not None
    names = re.findall(r'^\+    "(\w+)":', block[1], re.MULTILINE)
    listed = re.findall(r"^\| `sglang:ple_(\w+)_total`", (ROOT / "docs" / "SERVING.md").read_text(), re.MULTILINE)
    assert len(names) > 0
    assert listed == names
