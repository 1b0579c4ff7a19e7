"""The shipped prompt set is what its manifest says, and a changed one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from q4kit.errors import NotComparableError, UsageError
from q4kit.oracle import promptset


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(promptset.DEFAULT_FOLDER, tmp_path / "prompts"))


def test_the_shipped_texts_are_the_published_set() -> None:
    # This hash is in every recording: when it changes, the set needs a new name.
    found = promptset.load()
    assert found.name == "std1/text"
    assert found.sha256 == "15ac09e23a3842782918c8d4b49312c8c3b1a1d055ff72b7a3964a1b513f7e60"


def test_the_shipped_ids_are_the_published_set() -> None:
    assert promptset.load("ids").sha256 == "e68db22dea83efc2f96b44422b0f86fd1698d990b79df08d98ed7d11b84c2cae"


def test_words_and_ids_are_what_the_generators_make() -> None:
    assert (promptset.DEFAULT_FOLDER / "words.txt").read_text() == promptset.random_words()
    assert json.loads((promptset.DEFAULT_FOLDER / "ids.json").read_text()) == promptset.random_ids()


def test_words_are_distinct() -> None:
    words = promptset.random_words().split()
    assert len(words) == len(set(words)) == 420


def test_ids_fit_the_smallest_vocabulary_stated() -> None:
    chosen = promptset.load("ids")
    assert all(0 <= token < chosen.min_vocab <= 512 for prompt in chosen.prompts for token in prompt.ids or ())


def test_the_long_prompt_holds_every_text() -> None:
    prompts = {prompt.name: prompt.text or "" for prompt in promptset.load().prompts}
    assert all(text in prompts["long"] for name, text in prompts.items() if name != "long")


def test_one_changed_letter_is_refused_by_file_name(copy: Path) -> None:
    path = copy / "german.txt"
    path.write_text(path.read_text().replace("Werkstatt", "Werkstadt", 1))
    with pytest.raises(NotComparableError, match=r"german\.txt: the prompt set was changed"):
        promptset.load(folder=copy)


def test_a_missing_file_is_refused_by_name(copy: Path) -> None:
    (copy / "code.txt").unlink()
    with pytest.raises(NotComparableError, match=r"code\.txt: named by the manifest but missing"):
        promptset.load(folder=copy)


def test_a_folder_without_a_manifest_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no prompt set there"):
        promptset.load(folder=tmp_path)


def test_an_unknown_schema_is_refused(copy: Path) -> None:
    path = copy / promptset.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(UsageError, match="schema 99, expected 1"):
        promptset.load(folder=copy)
