"""What a gate run would do, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from q4kit import series as series_package
from q4kit.errors import UsageError
from q4kit.gate import commands, plan
from q4kit.series import Series


@pytest.fixture(scope="module")
def series() -> Series:
    return series_package.load()


def config(**fields: object) -> plan.Config:
    return plan.Config(model=Path("m"), python="python", prefixes=(0, 1), **fields)  # type: ignore[arg-type]


def test_all_prefixes_by_default_and_both_ends_included() -> None:
    assert plan.choose_prefixes(4, None, None, None) == (0, 1, 2, 3, 4)
    assert plan.choose_prefixes(4, None, 2, 3) == (2, 3)
    assert plan.choose_prefixes(19, "19, 0,7,7", None, None) == (0, 7, 19)


@pytest.mark.parametrize(
    ("listed", "first", "last"), [("0,20", None, None), ("-1", None, None), ("0,x", None, None), (None, 5, 4)]
)
def test_prefixes_that_do_not_exist_are_refused(listed: str | None, first: int | None, last: int | None) -> None:
    with pytest.raises(UsageError):
        plan.choose_prefixes(19, listed, first, last)


def test_a_list_and_a_range_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        plan.choose_prefixes(19, "0,1", 0, None)


def test_both_spellings_of_an_argument() -> None:
    assert plan.parse_arguments(["--a", "1", "--b=2", "--c"]) == [("--a", "1"), ("--b", "2"), ("--c", None)]
    with pytest.raises(UsageError, match="'2' follows no flag"):
        plan.parse_arguments(["--a=1", "2"])


@pytest.mark.parametrize("words", [["--ple-offload-backend", "nvme"], ["--ple-offload-backend=nvme"]])
def test_an_argument_of_a_later_patch_is_unknown_below_it(series: Series, words: list[str]) -> None:
    number = next(e.number for e in series.entries if "--ple-offload-backend nvme" in e.adds)
    below = plan.unknown_argument(series, number - 1, words)
    assert below == f"argument `--ple-offload-backend nvme` from patch {number} on"
    assert plan.unknown_argument(series, number, words) == ""


def test_an_old_value_of_a_flag_that_gained_one_is_known_everywhere(series: Series) -> None:
    assert plan.unknown_argument(series, 0, ["--ple-offload-backend", "pinned"]) == ""


def test_the_defaults_are_known_at_every_prefix(series: Series) -> None:
    for device in ("cpu", "cuda"):
        assert plan.unknown_argument(series, 0, config(device=device).arguments()) == ""


def test_the_users_argument_replaces_its_default() -> None:
    arguments = config(device="cuda", server_args=("--max-total-tokens", "1000")).arguments()
    assert [a for a in arguments if "max-total" in a] == ["--max-total-tokens"]
    assert arguments[-1] == "1000"


def test_an_expectation_needs_both_halves() -> None:
    assert plan.parse_expectation(8, "Unsupported BCG") == plan.Expectation(8, "Unsupported BCG")
    for serves_from, pattern in ((8, None), (None, "x")):
        with pytest.raises(UsageError, match="belong together"):
            plan.parse_expectation(serves_from, pattern)
    with pytest.raises(UsageError, match=r"regular expression|unterminated|missing"):
        plan.parse_expectation(8, "(")


def test_a_plant_is_named_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "f.patch"
    file.write_text("diff")
    found = commands.plant(file, None, (0, 7, 19))
    assert found is not None
    assert (found.at, len(found.sha256)) == (19, 64)
    with pytest.raises(UsageError, match="no chosen prefix"):
        commands.plant(file, 20, (0, 7, 19))
    with pytest.raises(UsageError, match="without --plant"):
        commands.plant(None, 3, (0,))
    with pytest.raises(UsageError, match="No such file"):
        commands.plant(tmp_path / "none.patch", None, (0,))
