"""The Triton kernels compile for sm_90 at the sizes of the 3b preset and fit a multiprocessor; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
SHARED = 227 * 1024  # bytes that one program may use on sm_90


@pytest.mark.slow
def test_kernels_compile_for_sm_90(tmp_path):
    script = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run(
        [sys.executable, str(script), str(tmp_path / "found.json")], env=environment, check=True, timeout=300
    )
    found = json.loads((tmp_path / "found.json").read_text())
    names = {"_conv_kernel", "_step_kernel", "_norm_kernel", "_read_kernel", "_part_kernel", "_join_kernel"}
    names |= {"_forward_kernel", "_backward_kernel"}
    assert {row["kernel"] for row in found} == names
    for row in found:
        assert row["bytes"] > 0 and row["shared"] <= SHARED, row
