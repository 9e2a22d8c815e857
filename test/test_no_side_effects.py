"""A compile changes nothing that other backends or the user can see."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

CODE = textwrap.dedent("""
    import copy, os, sys, threading, warnings
    import torch, torch._dynamo, torch._functorch.config, torch._inductor.config, torch._inductor.decomposition
    import torch._decomp, torch.fx.experimental._config

    def settings(module):
        found = {k: copy.copy(v) for k, v in module.get_config_copy().items()}
        assert found
        return found

    def state():
        decomp = torch._decomp
        return {
            "decomposition_table": dict(decomp.decomposition_table),
            "core_aten": set(decomp.core_aten_decompositions()),
            "meta": dict(decomp.meta_table),
            "post_autograd": dict(decomp.global_decomposition_table["post_autograd"]),
            "pre_autograd": dict(decomp.global_decomposition_table["pre_autograd"]),
            "inductor_decompositions": dict(torch._inductor.decomposition.decompositions),
            "dynamo": settings(torch._dynamo.config),
            "functorch": settings(torch._functorch.config),
            "inductor": settings(torch._inductor.config),
            "symbolic": settings(torch.fx.experimental._config),
            "compiler": settings(torch.compiler.config),
            "fx_codegen": torch.fx.graph.CodeGen._gen_python_code,
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "grad": torch.is_grad_enabled(),
            "default_dtype": torch.get_default_dtype(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "mkldnn": (torch.backends.mkldnn.enabled, torch.backends.mkldnn.is_available()),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "rng": torch.get_rng_state().tolist(),
            "environment": dict(os.environ),
            "path": list(sys.path),
            "flags": sys.getdlopenflags(),
            "recursion": sys.getrecursionlimit(),
            "warnings": list(warnings.filters),
            "hook": sys.excepthook,
            "cwd": os.getcwd(),
            "denormals": torch.tensor([float("1e-42")]).mul(1.0).item(),
        }

    def run(backend):
        torch._dynamo.reset()
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
        x = torch.ones(4, 8)
        f = torch.compile(model, backend=backend)
        f(x).sum().backward()
        with torch.no_grad():
            f(x)
        torch.compile(lambda x: (x * 2).cumsum(0)[:, :3], backend=backend, dynamic=True)(x)

    run("eager")            # what Dynamo itself initialises
    run("aot_eager")
    before = state()
    rng = torch.get_rng_state()
    run("dicp_cpu")
    torch.set_rng_state(rng)
    after = state()
    for name in before:
        if before[name] == after[name]:
            continue
        a, b = before[name], after[name]
        if isinstance(a, dict):
            a, b = ({k: v for k, v in x.items() if not (k in y and y[k] == v)} for x, y in ((a, b), (b, a)))
        print(f"{name}: {a!r} -> {b!r}"[:600])
    print("compared", len(before))
""")


def test_a_compile_leaves_torch_as_it_was(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "DICP_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compared 28\n"


def test_importing_every_module_changes_no_table() -> None:
    """Import-time work is none of ours: not even the op library is registered."""
    code = """
import torch, torch._decomp, importlib, pkgutil
import dicp
before = dict(torch._decomp.decomposition_table)
for m in pkgutil.walk_packages(dicp.__path__, "dicp."):
    if "cuda_graph" not in m.name and "conformance" not in m.name and not m.name.endswith("__main__"):
        importlib.import_module(m.name)
assert dict(torch._decomp.decomposition_table) == before
assert not hasattr(torch.ops.dicp, "linear")
print("same")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "same\n", done.stderr
