"""The row reader of the patched SGLang, loaded when it is needed and not before."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

from q4kit.errors import EnvironmentFault

_MODULE = "sglang.srt.layers.ple_rows"


def rows_module() -> ModuleType:
    """Return the patched SGLang's row reader package; EnvironmentFault where there is none."""
    # Importing sglang probes for a GPU unless a platform is named; reading rows needs none.
    if importlib.util.find_spec("sglang_cpu_ref") is not None:
        os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")
    try:
        return importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if error.name is None or not _MODULE.startswith(error.name):
            raise
        missing = "SGLang is not installed" if error.name == "sglang" else "this SGLang has no on-disk PLE row reader"
        raise EnvironmentFault(
            f"{missing} ({error.name} not found)",
            remedy="apply the series to the environment's SGLang: python tools/series.py apply",
        ) from error


def package(rows: ModuleType) -> Path:
    """Return the folder of the sglang package that the row reader package lies in."""
    return Path(str(rows.__file__)).parents[len(_MODULE.split(".")) - 1]
