"""What the oracle's unit tests share beside fixtures: small options and the type of the recording function."""

from __future__ import annotations

from collections.abc import Callable

from q4kit.oracle.plan import Options
from q4kit.oracle.recording import Recording

OPTIONS = Options(scored=60, decode_tokens=7, top=5, max_prompt_tokens=100)
Record = Callable[..., Recording]
