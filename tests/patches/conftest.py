"""Patch tests run against whatever `sglang` the interpreter finds: stock or patched, by PYTHONPATH alone."""

from __future__ import annotations

import os

# Before any sglang import: no GPU platform probing, no torch.compile (its results differ from eager in bf16).
os.environ.setdefault("SGLANG_PLATFORM", "cpu_ref")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
