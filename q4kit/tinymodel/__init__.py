"""Random Qwen4-Exp checkpoints in the published on-disk layout, for tests and benchmarks without a
download.
"""

from q4kit.tinymodel.options import PRESETS, Options
from q4kit.tinymodel.writer import Generated, generate

__all__ = ["PRESETS", "Generated", "Options", "generate"]
