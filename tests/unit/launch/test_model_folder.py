"""The look at a checkpoint folder that all tools share."""

from __future__ import annotations

from pathlib import Path

import pytest

from q4kit.errors import UsageError
from q4kit.server import model_folder


def test_a_folder_with_a_config_passes_and_all_else_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    for folder, said in (
        (tmp_path, f"{tmp_path} holds no config.json"),
        (tmp_path / "nowhere", f"{tmp_path / 'nowhere'}: no such folder"),
        (file, f"{file} is a file, expected a checkpoint folder"),
    ):
        with pytest.raises(UsageError) as caught:
            model_folder.check(folder)
        assert str(caught.value) == said
        assert "tools/make_tiny_model.py" in caught.value.remedy
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        model_folder.check(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_text("{}")
    model_folder.check(tmp_path)
