"""AVX-512 emulated on a processor with AVX2 alone (`scripts/emulate_avx512.sh`): kernels with vectors of 16 run
there. That the emulation is right, test_vec_header.py and test_cpu_kernels.py show under it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dicp.vendor.cpu_graph.toolchain import cpu_flags

EMULATION = Path(__file__).parents[1] / "emulation"

PROGRAM = """
import emulated_avx512
import torch
from dicp.config import Config
from dicp.vendor.cpu_graph import toolchain

assert toolchain.lanes(Config.make()) == 16

def f(x, n):
    rows = torch.softmax(torch.where(x > 0, x, x.sin()), -1)  # a library function, comparisons, a tail of three
    return rows, x.abs().half().double().sqrt(), (n * 3 < n + 40).sum(0), n.to(torch.int16)

x, n = torch.randn(5, 35), torch.arange(105).reshape(3, 35)
for got, want in zip(torch.compile(f, backend="dicp_cpu")(x, n), f(x, n), strict=True):
    torch.testing.assert_close(got, want)
"""


@pytest.mark.skipif(not {"avx2", "fma", "f16c"} <= cpu_flags(), reason="emulated with AVX2")
@pytest.mark.skipif(shutil.which("g++") is None, reason="emulated for g++")
def test_kernels_with_vectors_of_16_run_without_avx512(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(EMULATION), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "DICP_CXX": f"bash {EMULATION / 'cxx'}", "DICP_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **own}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(tmp_path.rglob("*.cpp"))  # it was built here
