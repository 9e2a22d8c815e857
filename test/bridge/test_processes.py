"""What must hold in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **env},
        check=False,
    )


def test_import_dicp_is_light() -> None:
    """No torch, and (the best of several imports, in the process's own CPU time) under 50 ms."""
    done = python("""
        import sys, time
        start = time.process_time()
        import dicp
        seconds = time.process_time() - start
        assert "torch" not in sys.modules and "sympy" not in sys.modules and "numpy" not in sys.modules
        assert dicp.__version__
        print(seconds)
    """)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.05


def test_backends_are_listed_and_found_without_importing_dicp() -> None:
    done = python("""
        import sys, torch
        listed = torch.compiler.list_backends()
        assert {"dicp", "dicp_cpu", "dicp_cuda", "cpugraph", "cudagraph"} <= set(listed), listed
        heavy = [m for m in sys.modules if m.startswith("dicp") and m not in ("dicp", "dicp.autoload")]
        assert not heavy, heavy
        x = torch.randn(5)
        for backend in ("dicp", "cpugraph"):
            torch._dynamo.reset()
            assert torch.allclose(torch.compile(lambda x: x.exp() + 1, backend=backend)(x), x.exp() + 1)
        print("ran")
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran\n"


@pytest.mark.parametrize("logs", ["+dicp", "dicp"])
def test_torch_logs_knows_dicp(logs: str) -> None:
    done = python(
        """
        import torch
        torch.compile(lambda x: x.exp() + 1, backend="dicp_cpu")(torch.randn(5))
    """,
        TORCH_LOGS=logs,
    )
    assert done.returncode == 0, done.stderr
    assert "graph0_inference: 1 kernels" in done.stderr


def test_quiet_without_settings() -> None:
    done = python("""
        import torch
        torch.compile(lambda x: x.exp() + 1, backend="dicp_cpu")(torch.randn(5))
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_second_process_builds_nothing() -> None:
    code = """
        import torch
        from dicp.compiler import observe
        with observe(lambda c: print(c.program.build_stats.compiled)):
            torch.compile(lambda x: (x * 17.5).exp() + 3, backend="dicp_cpu")(torch.ones(5))
    """
    python(code)
    second = python(code)
    assert second.stdout == "0\n", second.stderr
