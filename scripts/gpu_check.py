"""Conformance, models and measurements of dicp_cuda on a GPU; see gpu_check.sh. Each part runs in its own
process with a
time limit, results are written after each: a part that hangs or crashes costs its own lines only."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUDGET_S = 530.0
PARTS = {"conformance": 150, "kernels": 60, "models": 180, "decode": 70, "overhead": 40, "compile": 60}
BACKENDS = ("eager", "inductor", "inductor-max", "dicp_cuda", "dicp_cuda-graphs")


def backend_of(name: str, fn: Any) -> Any:
    """fn under a way of running it."""
    import torch

    import_backend()
    if name == "eager":
        return fn
    if name.startswith("inductor"):
        return torch.compile(fn, mode="max-autotune" if name.endswith("max") else None)
    return torch.compile(
        fn, backend=dicp(), **({"mode": "reduce-overhead"} if name.endswith("graphs") else {})
    )


def dicp() -> Callable[..., Any]:
    """The backend itself: the checkout need not be installed."""
    from dicp.dynamo_bridge.backend import dicp_cuda

    return dicp_cuda


def import_backend() -> None:
    """Let the vendor be found where dicp is not installed."""
    import dicp.vendor as vendors
    from dicp.vendor.cuda_graph import vendor

    if "cuda_graph" not in vendors.names():
        known = vendors.get
        vendors.get = lambda name: vendor if name == "cuda_graph" else known(name)  # type: ignore[assignment]


def milliseconds(fn: Callable[[], Any], seconds: float = 1.0) -> float:
    """Median time of a call, by CUDA events, at least 5 runs."""
    import torch

    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        fn()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def conformance(found: dict[str, Any]) -> None:
    """Operators against eager on the device, each with forward and gradient, in three dtypes."""
    import torch
    import torch.nn.functional as F

    x = torch.randn(64, 129, device="cuda")
    at = torch.randint(0, 64, (40,), device="cuda")
    cases: dict[str, Callable[[Any], Any]] = {
        "softmax": lambda x: torch.softmax(x, -1),
        "layer_norm": lambda x: F.layer_norm(x, (129,)),
        "gelu": F.gelu,
        "silu": F.silu,
        "var": lambda x: x.var(-1),
        "sum0": lambda x: x.sum(0),
        "cumsum": lambda x: x.cumsum(-1),
        "transpose": lambda x: x.t().contiguous() + 1,
        "amax": lambda x: x.amax(-1),
        "embedding": lambda x: F.embedding(at, x),
        "index_add": lambda x: torch.zeros_like(x).index_add(0, at, x[:40]),
        "mm": lambda x: torch.relu(x @ x.t()),
        "pad": lambda x: F.pad(x, (1, 2)),
        "cat": lambda x: torch.cat([x, x * 2], 1),
        "argmax": lambda x: x.argmax(-1),
        "sort": lambda x: x.sort(-1).values,
        "logsumexp": lambda x: x.logsumexp(-1),
        "erf": torch.erf,
        "tanh": torch.tanh,
        "lgamma": lambda x: torch.lgamma(x.abs() + 1),
        "pow": lambda x: x.abs() ** 1.7,
        "where": lambda x: torch.where(x > 0, x, x.exp()),
        "std0": lambda x: x.std(0),
        "long_row": lambda x: x.flatten().sum(),
        "max_pool": lambda x: F.max_pool2d(x[None, None], 2),
        "conv": lambda x: F.conv2d(x[None, None], x[None, None, :3, :3]),
    }
    import_backend()
    for name, fn in cases.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            torch._dynamo.reset()
            key = f"{name}.{str(dtype).removeprefix('torch.')}"
            try:
                found[key] = agreement(fn, x.to(dtype))
            except Exception as e:  # noqa: BLE001  a report goes on
                found[key] = f"{type(e).__name__}: {str(e)[:300]}"


def agreement(fn: Callable[[Any], Any], x: Any) -> str:
    """ "ok" when result and gradient are as close to float64 as eager's, or within 2x of that."""
    import torch

    compiled = torch.compile(fn, backend=dicp())

    def both(f: Callable[[Any], Any], v: Any) -> list[Any]:
        v = v.detach().clone().requires_grad_()
        y = f(v)
        if not y.is_floating_point():
            return [y]
        y.float().square().sum().backward() if y.dtype != torch.float64 else y.square().sum().backward()
        return [y.detach(), v.grad]

    exact, eager, ours = both(fn, x.double()), both(fn, x), both(compiled, x)
    for e, a, b in zip(exact, eager, ours, strict=True):
        if not e.is_floating_point():
            if not torch.equal(a, b):
                return "differs from eager"
            continue
        size = e.norm() + 1e-30
        theirs, mine = (a.double() - e).norm() / size, (b.double() - e).norm() / size
        if mine > 2 * theirs + 4 * torch.finfo(x.dtype).eps ** 1.5 + 1e-7:
            return f"error {mine:.2e}, eager's {theirs:.2e}"
    return "ok"


def kernels(found: dict[str, Any]) -> None:
    """Memory-bound kernels, in % of the bandwidth of a measured copy."""
    import torch
    import torch.nn.functional as F

    n = 8192
    x = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / milliseconds(lambda: y.copy_(x)) / 1e6
    found["copy GB/s"] = copy
    cases: dict[str, tuple[Callable[..., Any], int]] = {
        "add": (lambda: x + y, 3),
        "silu_mul": (lambda: F.silu(x) * y, 3),
        "gelu": (lambda: F.gelu(x), 2),
        "softmax": (lambda: torch.softmax(x, -1), 2),
        "rms_norm": (lambda: F.rms_norm(x, (n,), w), 2),
        "layer_norm": (lambda: F.layer_norm(x, (n,), w, w), 2),
        "sum_rows": (lambda: x.sum(-1), 1),
        "sum_columns": (lambda: x.sum(0), 1),
        "transpose": (lambda: x.t() + 1, 2),
        "transpose_copy": (lambda: x.t().contiguous(), 2),
        "sum_all": (lambda: x.sum(), 1),
    }
    for name, (fn, passes) in cases.items():
        for backend in ("eager", "inductor", "dicp_cuda"):
            torch._dynamo.reset()
            try:
                ms = milliseconds(backend_of(backend, fn), 0.2)
                found[f"{name} {backend} %"] = round(100 * passes * x.nbytes / ms / 1e6 / copy, 1)
            except Exception as e:  # noqa: BLE001
                found[f"{name} {backend} %"] = f"{type(e).__name__}: {str(e)[:200]}"


def transformer(layers: int = 4, width: int = 1024) -> Any:
    """An encoder when transformers is missing."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(
        width, 16, 4 * width, batch_first=True, dropout=0.0, norm_first=True
    )
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def model_cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """name -> (model, inputs)"""
    import torch

    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "encoder": (transformer(), {"src": torch.randn(8, 512, 1024)})
    }
    try:
        from dicp.bench.models import CASES

        for name, case in CASES.items():
            cases[name] = (case.build("full"), case.inputs("full", 0, torch.bfloat16))
    except ImportError as e:
        print(f"without the models: {e}")
    return cases


def models(found: dict[str, Any]) -> None:
    """Inference in bf16 and fp32, and a training step in bf16, against eager and Inductor."""
    import torch

    def on_gpu(v: Any, dtype: Any) -> Any:
        return (
            v.cuda().to(dtype)
            if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v.cuda()
            if isinstance(v, torch.Tensor)
            else v
        )

    for name, (model, inputs) in model_cases().items():
        for dtype in (torch.bfloat16, torch.float32):
            m = model.cuda().to(dtype).eval()
            given = {k: on_gpu(v, dtype) for k, v in inputs.items()}
            short = str(dtype).removeprefix("torch.")
            for backend in BACKENDS if dtype == torch.bfloat16 else ("eager", "inductor", "dicp_cuda"):
                torch._dynamo.reset()
                key = f"{name} {short} inference {backend} ms"
                try:
                    run = backend_of(backend, m)
                    with torch.no_grad():
                        found[key] = milliseconds(lambda run=run, given=given: run(**given))
                        if backend == "dicp_cuda":
                            a, b = first(m(**given)), first(run(**given))
                            found[f"{name} {short} agrees"] = float((a - b).float().norm() / a.float().norm())
                except Exception as e:  # noqa: BLE001
                    found[key] = f"{type(e).__name__}: {str(e)[:200]}"
        m = model.cuda().to(torch.bfloat16).train()
        for backend in ("eager", "inductor", "dicp_cuda"):
            torch._dynamo.reset()
            try:
                run = backend_of(backend, m)

                def step(run: Any = run, m: Any = m, inputs: Any = inputs) -> None:
                    given = {k: on_gpu(v, torch.bfloat16) for k, v in inputs.items()}
                    first(run(**given)).float().square().mean().backward()
                    m.zero_grad(set_to_none=True)

                found[f"{name} bfloat16 training {backend} ms"] = milliseconds(step)
            except Exception as e:  # noqa: BLE001
                found[f"{name} bfloat16 training {backend} ms"] = f"{type(e).__name__}: {str(e)[:200]}"
        model.cpu()


def first(output: Any) -> Any:
    """The scores in a model's output."""
    import torch

    return (
        output
        if isinstance(output, torch.Tensor)
        else output.logits
        if hasattr(output, "logits")
        else output[0]
    )


def decode(found: dict[str, Any]) -> None:
    """LLaMA-like decoding, one token at a time in bf16: tokens per second, and % of a copy's bandwidth."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self, d: int = 2048, h: int = 5632) -> None:
            super().__init__()
            self.n1, self.n2 = torch.nn.RMSNorm(d), torch.nn.RMSNorm(d)
            self.qkv, self.o = torch.nn.Linear(d, 3 * d, bias=False), torch.nn.Linear(d, d, bias=False)
            self.gate, self.up = torch.nn.Linear(d, h, bias=False), torch.nn.Linear(d, h, bias=False)
            self.down = torch.nn.Linear(h, d, bias=False)

        def forward(self, x: Any, k: Any, v: Any) -> Any:
            q, nk, nv = self.qkv(self.n1(x)).reshape(1, 1, 3, 16, 128).permute(2, 0, 3, 1, 4)
            k, v = torch.cat([k, nk], 2), torch.cat([v, nv], 2)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + self.o(y.transpose(1, 2).reshape(1, 1, -1))
            z = self.n2(x)
            return x + self.down(torch.nn.functional.silu(self.gate(z)) * self.up(z))

    blocks = torch.nn.ModuleList(Block() for _ in range(16)).cuda().bfloat16()
    past = [torch.randn(1, 16, 511, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(1, 1, 2048, device="cuda", dtype=torch.bfloat16)
    nbytes = sum(p.nbytes for p in blocks.parameters()) + 16 * sum(t.nbytes for t in past)
    y, z = (torch.empty(1 << 28, device="cuda", dtype=torch.float32) for _ in range(2))
    peak = 2 * y.nbytes / milliseconds(lambda: z.copy_(y), 0.2) / 1e6

    def token(x: Any) -> Any:
        for b in blocks:
            x = b(x, *past)
        return x

    for backend in BACKENDS:
        torch._dynamo.reset()
        try:
            run = backend_of(backend, token)
            with torch.no_grad():
                ms = milliseconds(lambda run=run: run(x))
            found[f"{backend} tokens/s"], found[f"{backend} % of copy"] = (
                1e3 / ms,
                100 * nbytes / ms / 1e6 / peak,
            )
        except Exception as e:  # noqa: BLE001
            found[f"{backend} tokens/s"] = f"{type(e).__name__}: {str(e)[:200]}"


def overhead(found: dict[str, Any]) -> None:
    """Host time of a call of three operations on 16 elements, in microseconds."""
    import torch

    x = torch.randn(16, device="cuda")
    for backend in BACKENDS:
        torch._dynamo.reset()
        run = backend_of(backend, lambda x: torch.relu(x * 2 + 1).sum() + x)
        for _ in range(20):
            run(x)
        torch.cuda.synchronize()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(50):
                run(x)
            times.append((time.perf_counter() - start) / 50 * 1e6)
            torch.cuda.synchronize()
        found[f"{backend} us"] = statistics.median(times)


def compile(found: dict[str, Any]) -> None:
    """Seconds to the first result with empty caches, each backend in a process of its own."""
    code = """
import os, sys, time, tempfile
home = tempfile.mkdtemp()
os.environ.update(TORCHINDUCTOR_CACHE_DIR=home + "/i", TRITON_CACHE_DIR=home + "/t", DICP_CACHE_DIR=home +
"/d")
sys.path[:0] = ["scripts"]
import torch, gpu_check
m = gpu_check.transformer().cuda().bfloat16().eval()
x = torch.randn(8, 512, 1024, device="cuda", dtype=torch.bfloat16)
with torch.no_grad():
    m(x); torch.cuda.synchronize()
    start = time.perf_counter()
    gpu_check.backend_of(sys.argv[1], m)(x)
    torch.cuda.synchronize()
print("seconds", time.perf_counter() - start)
"""
    for backend in ("inductor", "dicp_cuda"):
        done = subprocess.run(
            [sys.executable, "-c", code, backend], capture_output=True, text=True, timeout=120
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("seconds")]
        found[f"{backend} s"] = float(lines[0].split()[1]) if lines else done.stderr[-300:]


class Found(dict[str, Any]):
    """Results by name, in a file after each."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.file.write_text(json.dumps(self))


def environment() -> dict[str, Any]:
    import torch
    import triton

    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def page(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["# dicp_cuda on a GPU", "", ", ".join(f"{k} {v}" for k, v in report["environment"].items()), ""]
    for part, found in report["parts"].items():
        lines += [f"## {part}", "", "| what | result |", "| --- | --- |"]
        for what, result in found.items():
            text = (
                f"{result:.4g}"
                if isinstance(result, float)
                else str(result).replace("\n", " ").replace("|", "/")
            )
            lines.append(f"| {what} | {text} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_check_results"))
    parser.add_argument("--part", choices=PARTS, help="run one part in this process")
    args = parser.parse_args()
    if args.part:
        globals()[args.part](Found(args.out))
        return 0
    report: dict[str, Any] = {"environment": environment(), "parts": {}}
    start = time.perf_counter()
    for part, limit in PARTS.items():
        left = BUDGET_S - (time.perf_counter() - start)
        file = args.out / f"{part}.json"
        note = {}
        try:
            command = [sys.executable, __file__, "--part", part, "--out", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(5, min(limit, left)))
            note = {} if done.returncode == 0 else {"failed": done.stderr[-600:]}
        except subprocess.TimeoutExpired:
            note = {"stopped": f"after {limit} s"}
        found = json.loads(file.read_text()) if file.exists() else {}
        report["parts"][part] = found | note
        (args.out / "gpu_check.json").write_text(json.dumps(report, indent=1))
        (args.out / "gpu_check.md").write_text(page(report))
        print(f"{part}: {len(found)} results {note or ''} ({time.perf_counter() - start:.0f} s)", flush=True)
        file.unlink(missing_ok=True)
    wrong = [k for k, v in report["parts"]["conformance"].items() if v != "ok"]
    print(
        f"{args.out / 'gpu_check.md'}; {len(wrong)} of the operators disagree"
        + (f": {wrong[:20]}" if wrong else "")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
