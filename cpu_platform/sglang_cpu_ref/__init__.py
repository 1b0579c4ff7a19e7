"""Entry points of the platform. Nothing here imports torch or sglang: SGLang loads this in every process."""

from __future__ import annotations

import os

PLATFORM = "cpu_ref"


def selected() -> bool:
    """Return whether the user asked for this platform (`SGLANG_PLATFORM=cpu_ref`)."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM


def activate() -> str | None:
    """Return the platform class for SGLang, or None: merely installed, the plugin must never take over a
    GPU server.
    """
    return "sglang_cpu_ref.platform:CpuRefPlatform" if selected() else None


def register() -> None:
    """Register the load check, if `SGLANG_CPU_REF_CHECK_LOAD=1` asks for it."""
    if selected() and os.environ.get("SGLANG_CPU_REF_CHECK_LOAD") == "1":
        from sglang_cpu_ref import load_check

        load_check.register()
