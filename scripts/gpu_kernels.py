"""Every kernel that a GPU is given for a model, compiled down to its binary; no GPU is needed.

    python scripts/gpu_kernels.py                                  # the benchmark's models, both phases, bf16
    python scripts/gpu_kernels.py --models llama,resnet50 --phases training --archs 90 --size small

Models are traced on fake tensors of a device that exists in torch's books alone (one_gpu.cpp), so that
layouts, library calls and saved values are those of a device, not of CPU tensors under Triton's interpreter.
Each row, a line of JSON, is of a process of its own.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ARCHS = (80, 90, 100)


class Traced(Exception):
    """A program is to run: all there is to see has been compiled."""


def build_device(folder: Path) -> Path:
    """The library of one_gpu.cpp for the torch that is installed."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    torch_dir = Path(spec.submodule_search_locations[0])
    source, out = Path(__file__).with_name("one_gpu.cpp"), folder / "one_gpu.so"
    where = [f"-I{torch_dir}/include", f"-L{torch_dir}/lib", f"-Wl,-rpath,{torch_dir}/lib"]
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", *where, "-ltorch_cpu", "-lc10"]
    subprocess.run([os.environ.get("CXX", "g++"), str(source), "-o", str(out), *flags], check=True)
    return out


def trace(model_name: str, phase: str, dtype: str, size: str) -> list[Any]:
    """The programs of a model, as they would be assembled for an H100: forward and backward in training. What
    a driver is asked for is answered here."""
    import torch
    import torch._functorch.config
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dicp.bench import arms
    from dicp.bench.models import CASES
    from dicp.bench.workloads import DTYPES
    from dicp.vendor.cuda_graph import CudaGraph, assemble, gpu, grouped

    programs: list[Any] = []

    def keep(program: Any, config: Any) -> Any:
        def run(args: list[Any]) -> Any:
            raise Traced

        programs.append(program)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment,misc]
    CudaGraph.available = lambda self, config: None  # type: ignore[method-assign]
    CudaGraph.machine = lambda self, config: gpu(32)  # type: ignore[method-assign]
    grouped._has_kernel = lambda: True
    assemble.assemble = keep
    case = CASES[model_name]
    model, inputs = arms.cast(case.build(size), DTYPES[dtype]), case.inputs(size, 0, DTYPES[dtype])
    model.train(phase == "training").requires_grad_(phase == "training")
    with FakeTensorMode(), torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        move(model)
        compiled = torch.compile(model, backend="dicp_cuda", fullgraph=True)
        try:
            compiled(**{k: like(v) for k, v in inputs.items()})
        except Traced:
            pass
    return programs


def like(t: Any) -> Any:
    import torch

    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")


def move(model: Any) -> None:
    """To the device, in place: parameters that are shared stay so. (`Module.to` cannot make them fake.)"""
    import torch

    made: dict[int, Any] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                made.setdefault(id(p), torch.nn.Parameter(like(p), p.requires_grad))
                module._parameters[name] = made[id(p)]
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else like(b)


def compiled(programs: list[Any], archs: list[int], workers: int) -> dict[str, Any]:
    """What programs are made of; every distinct kernel is compiled. Raises BuildError."""
    from triton.backends.compiler import GPUTarget

    from dicp.config import Config
    from dicp.vendor.cuda_graph import launch
    from dicp.vendor.cuda_graph.assemble import emit_all

    config = Config.make()
    sources = {digest: s for p in programs for digest, s in emit_all(p, config).items()}

    def build(source: Any, arch: int) -> int:
        fn, target = launch.load(source, config), GPUTarget("cuda", arch, 32)
        variants = (True, False) if "V" in source.constants else (True,)  # whether addresses are aligned
        made = [launch.compile_for(source, fn, target, aligned) for aligned in variants]
        return sum(bool(m.asm["cubin"]) for m in made)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        counts = [pool.submit(build, s, arch) for s in sources.values() for arch in archs]
        binaries = sum(f.result() for f in counts)
    calls = collections.Counter(str(c.claim.name) for p in programs for c in p.library_calls)
    return {
        "programs": [p.name.split("_", 1)[1] for p in programs],
        "kernels": len(sources),
        "binaries": binaries,
        "launches": sum(len(p.launches) for p in programs),
        "library": dict(calls),
        "externs": [str(c.node.target) for p in programs for c in p.externs],
    }


def one(options: argparse.Namespace, row: list[str]) -> dict[str, Any]:
    ctypes.CDLL(options.device, mode=ctypes.RTLD_GLOBAL)
    archs = [int(a) for a in options.archs.split(",")]
    programs = trace(*row, options.size)
    expected = 2 if row[1] == "training" else 1
    if len(programs) != expected:
        raise SystemExit(f"{len(programs)} programs were assembled, and {expected} expected")
    return compiled(programs, archs, options.workers)


def in_fresh_process(options: argparse.Namespace, row: list[str], device: Path) -> dict[str, Any]:
    how = ["--size", options.size, "--archs", options.archs, "--workers", str(options.workers)]
    command = [sys.executable, __file__, "--one", ",".join(row), "--device", str(device), *how]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-12:]}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = "llama,qwen,mixtral,gpt2,bert,t5,whisper,vit,resnet50,mobilenet_v2,convnext,unet"
    parser.add_argument("--models", default=models)
    parser.add_argument("--phases", default="inference,training")
    parser.add_argument("--dtypes", default="bf16", help="some of fp32,bf16")
    parser.add_argument("--size", default="full", choices=("full", "small"))
    parser.add_argument(
        "--archs", default=",".join(map(str, ARCHS)), help="compute capabilities, without dots"
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return print(json.dumps(one(options, options.one.split(","))))
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        device = build_device(Path(folder))
        for model in options.models.split(","):
            for phase in options.phases.split(","):
                for dtype in options.dtypes.split(","):
                    found = in_fresh_process(options, [model, phase, dtype], device)
                    failed += "failed" in found
                    print(json.dumps({"model": model, "phase": phase, "dtype": dtype, **found}), flush=True)
    if failed:
        sys.exit(f"{failed} rows failed")


if __name__ == "__main__":
    main()
