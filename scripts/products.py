"""What docs/cpu_graph.md says of products: GF/s of ATen's low precision beside float32's with the conversions
and beside dicp_cpu's; int8 weights; bf16 into memory that is given; and of float32 by MKL, by oneDNN and by
what dicp_cpu calls, with how far each errs, and how the operands lie.

    python scripts/products.py
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.bench.measure import alternating
from dicp.compiler import observe
from dicp.vendor.cpu_graph.claims import matmul
from dicp.vendor.cpu_graph.claims.common import onednn_has

LOW = (torch.bfloat16, torch.float16)
MATRICES = ((16, 1024, 1024), (64, 1024, 1024), (128, 768, 3072), (256, 768, 3072), (256, 1024, 1024))
MATRICES += ((1024, 1024, 1024), (512, 3072, 768), (1568, 768, 768), (6272, 96, 384), (392, 1536, 384))
BATCHES = ((48, 512, 64, 512), (48, 512, 512, 64), (96, 197, 64, 197), (96, 197, 197, 64))
BATCHES += ((8, 1024, 256, 1024),)
LAYOUTS = (  # sizes, whether x lies by columns, whether w lies along the depth
    ("linear", MATRICES, False, True),
    ("gradient of a weight", MATRICES, True, False),
    ("x by columns, w along the depth", MATRICES, True, True),
    ("batches", BATCHES, False, False),
    ("batches, x by columns", BATCHES, True, False),
)
CONSTANT = ((128, 1024, 32000), (256, 768, 50257), (256, 1024, 151936), (1024, 768, 3072), (6272, 96, 384))


def low_precision(label: str, flops: float, fn: Callable[..., Tensor], *operands: Tensor) -> None:
    """GF/s of fn in each low precision, by way of float32, and compiled."""
    figures = []
    for dtype in LOW:
        torch._dynamo.reset()
        given = [t.to(dtype) for t in operands]
        plain = functools.partial(fn, *given)
        compiled, _ = by_dicp(fn, given)
        ms = alternating([plain, functools.partial(through_float32, fn, given), compiled])
        each = zip((str(dtype), "through float32", "dicp_cpu"), ms, strict=True)
        figures += [f"{what} {flops / t / 1e6:.0f}" for what, t in each]
    print(f"{label}: {', '.join(figures)}", flush=True)


def through_float32(fn: Callable[..., Tensor], given: list[Tensor]) -> Tensor:
    return fn(*(t.float() for t in given)).to(given[0].dtype)


def by_dicp(
    fn: Callable[..., Tensor], given: Sequence[Tensor], **options: bool
) -> tuple[functools.partial[Tensor], str]:
    """fn compiled for these operands, and which call serves it. What is to be compared is not reset between:
    it would be compiled again, for what is preferred then."""
    compiled, seen = torch.compile(fn, backend="dicp_cpu", options=options or None), []
    with observe(seen.append):
        compiled(*given)
    names = [call.claim.name.rpartition(": ")[2] for found in seen for call in found.program.library_calls]
    return functools.partial(compiled, *given), ", ".join(names)


def int8_weights(rows: int, depth: int, columns: int) -> None:
    """Milliseconds of eager and of dicp_cpu, with weights stored as int8."""
    for dtype in (torch.float32, torch.bfloat16):
        x, scale = torch.randn(rows, depth).to(dtype), (torch.rand(columns) / 64).to(dtype)
        given = (x, torch.randint(-127, 128, (columns, depth), dtype=torch.int8), scale)
        torch._dynamo.reset()
        compiled, name = by_dicp(scaled, given)
        ms = alternating([functools.partial(scaled, *given), compiled])
        print(f"int8 {rows}x{depth}x{columns} {dtype}, ms: eager {ms[0]:.1f}, dicp_cpu {ms[1]:.1f} ({name})")


def scaled(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * scale


def product(rows: int, depth: int, columns: int, turned: bool) -> None:
    """GF/s of a float32 product by MKL, oneDNN and dicp_cpu, and how far each errs at most of operands of
    one sign, in units in the last place of the largest result.

    turned: the left operand lies by columns, as in the gradient of a weight.
    """
    x = torch.randn(depth, rows).t() if turned else torch.randn(rows, depth)
    w = torch.randn(columns, depth)
    torch._dynamo.reset()
    compiled, name = by_dicp(by_mkl, (x, w))
    flops = 2.0 * rows * depth * columns
    libraries = [functools.partial(call, x, w) for call in (by_mkl, by_onednn)]
    rates = [flops / ms / 1e6 for ms in alternating([*libraries, compiled])]
    x, w = x.abs(), w.abs()
    exact = x.double() @ w.double().t()
    unit = torch.finfo(torch.float32).eps * exact.max().item()
    results = by_mkl(x, w), by_onednn(x, w), compiled.func(x, w)
    errors = [(result.double() - exact).abs().max().item() / unit for result in results]
    print(
        f"{rows:6} {depth:6} {columns:8}  {'turned' if turned else '':6}"
        + "".join(f"{rate:9.0f}" for rate in rates)
        + "".join(f"{error:9.1f}" for error in errors)
        + f"  {name}",
        flush=True,
    )


def tiles(rows: int, depth: int, columns: int, times: int = 24) -> None:
    """GF/s of a float32 linear layer by MKL, and compiled, by oneDNN and by tiles, whatever dicp prefers, of
    `times` weights in turn, so that they come from memory as those of a model do."""
    x, weights = torch.randn(rows, depth), [torch.randn(columns, depth) for _ in range(times)]
    torch._dynamo.reset()
    compiled = {"MKL": F.linear}
    ways = ((lambda x, w: F.linear(x, w), 1 << 30, False), (lambda x, w: F.linear(x, w), 0, True))
    for fn, shallow, preferred in ways:
        depths = {True: shallow, False: shallow}
        prefers = patch.object(matmul, "prefers_tiles", lambda node, preferred=preferred: preferred)
        with patch.object(matmul, "SHALLOW", depths), prefers:
            by, name = by_dicp(fn, (x, weights[0]))
        compiled[name] = by.func

    rates = rates_in_turn(list(compiled.values()), x, weights)
    figures = ", ".join(f"{name} {rate:.0f}" for name, rate in zip(compiled, rates, strict=True))
    print(f"compiled {rows}x{depth}x{columns}: {figures}", flush=True)


def pairs(rows: int, depth: int, columns: int, times: int = 24) -> None:
    """GF/s in bf16 of a linear layer: compiled, without tiles of pairs and with them, and packed for oneDNN,
    of `times` weights in turn."""
    x = torch.randn(rows, depth).bfloat16()
    weights = [torch.randn(columns, depth).bfloat16() for _ in range(times)]
    packed = {w.data_ptr(): torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights}
    torch._dynamo.reset()
    with patch.object(matmul, "gemm_pairs", lambda label, node: None):
        unpacked, _ = by_dicp(lambda x, w: F.linear(x, w), (x, weights[0]))
    preferred, name = by_dicp(lambda x, w: F.linear(x, w), (x, weights[0]))
    calls = [unpacked.func, preferred.func, lambda x, w: by_onednn(x, packed[w.data_ptr()])]
    rates = rates_in_turn(calls, x, weights)
    figures = ", ".join(f"{n} {rate:.0f}" for n, rate in zip(("oneDNN", name, "packed"), rates, strict=True))
    print(f"bf16, compiled {rows}x{depth}x{columns}: {figures}", flush=True)


def constant(rows: int, depth: int, columns: int) -> None:
    """GF/s in bf16 of a frozen linear layer: packed for oneDNN, and in panels for our tiles."""
    x, layer = torch.randn(rows, depth).bfloat16(), torch.nn.Linear(depth, columns, bias=False).bfloat16()
    torch._dynamo.reset()
    calls = {}
    for fn, large in ((lambda x: layer(x), 1 << 62), (lambda x: layer(x), 0)):
        forms = patch.multiple(matmul, LARGE_RESULT=large, PANEL_DEPTH=0)
        with forms, torch.no_grad():
            call, name = by_dicp(fn, (x,), freeze=True)
        calls[name] = torch.no_grad()(call)
    flops = 2.0 * rows * depth * columns
    rates = [flops / ms / 1e6 for ms in alternating(list(calls.values()), 9)]
    figures = ", ".join(f"{name} {rate:.0f}" for name, rate in zip(calls, rates, strict=True))
    print(f"bf16, frozen {rows}x{depth}x{columns}: {figures}", flush=True)


def layout(name: str, sizes: Sequence[tuple[int, ...]], turned: bool, along_depth: bool) -> None:
    """Geometric means of GF/s in float32 by ATen, and compiled."""
    rates: list[list[float]] = []
    for *batch, rows, depth, columns in sizes:
        x = torch.randn(*batch, depth, rows).mT if turned else torch.randn(*batch, rows, depth)
        w = torch.randn(*batch, columns, depth).mT if along_depth else torch.randn(*batch, depth, columns)
        torch._dynamo.reset()
        compiled, _ = by_dicp(lambda x, w: x @ w, (x, w))
        flops = 2.0 * x.numel() * columns
        times = alternating([functools.partial(torch.matmul, x, w), compiled])
        rates.append([flops / ms / 1e6 for ms in times])
    theirs, ours = (statistics.geometric_mean(each) for each in zip(*rates, strict=True))
    print(f"{name}, {len(sizes)} products: ATen {theirs:.0f}, dicp_cpu {ours:.0f}", flush=True)


def rates_in_turn(fns: Sequence[Callable[..., Tensor]], x: Tensor, weights: Sequence[Tensor]) -> list[float]:
    """GF/s of each fn."""

    def each(fn: Callable[..., Tensor]) -> None:
        for w in weights:
            fn(x, w)

    flops = 2.0 * len(weights) * x.numel() * weights[0].shape[0]
    return [flops / ms / 1e6 for ms in alternating([functools.partial(each, fn) for fn in fns], 9)]


def in_place(rows: int, depth: int, columns: int) -> None:
    """GF/s in bf16 of oneDNN's call with an epilogue, which allocates its result, and of ATen's own, which is
    given one: of a linear layer, plain and with a bias, and of the gradient of its weight."""
    x, w, bias, grad = (
        torch.randn(shape).bfloat16()
        for shape in ((rows, depth), (columns, depth), (columns,), (rows, columns))
    )
    y, dw = torch.empty_like(grad), torch.empty_like(w)
    epilogue = torch.ops.mkldnn._linear_pointwise
    calls = {
        "plain": lambda: epilogue(x, w, None, "none", [], ""),
        "in place": lambda: torch.mm(x, w.t(), out=y),
        "bias": lambda: epilogue(x, w, bias, "none", [], ""),
        "bias, in place": lambda: torch.addmm(bias, x, w.t(), out=y),
        "of the weight": lambda: epilogue(grad.t(), x.t(), None, "none", [], ""),
        "of the weight, in place": lambda: torch.mm(grad.t(), x, out=dw),
    }
    rates = [2.0 * rows * depth * columns / ms / 1e6 for ms in alternating(list(calls.values()))]
    figures = ", ".join(f"{name} {rate:.0f}" for name, rate in zip(calls, rates, strict=True))
    print(f"bf16 {rows}x{depth}x{columns}: {figures}", flush=True)


def by_mkl(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def by_onednn(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")  # type: ignore[no-any-return]


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; GF/s")
    r = torch.randn
    low_precision("linear 512x1024x1024", 2.0 * 512 * 1024**2, F.linear, r(512, 1024), r(1024, 1024))
    image, window = r(2, 256, 14, 14), r(256, 256, 3, 3)
    flops = 2.0 * 2 * 14 * 14 * 256**2 * 9
    low_precision("convolution", flops, lambda x, w: F.conv2d(x, w, padding=1), image, window)
    image, window = r(2, 3, 224, 224), r(768, 3, 16, 16)
    flops = 2.0 * 2 * 14 * 14 * 3 * 16**2 * 768
    low_precision("patches", flops, lambda x, w: F.conv2d(x, w, stride=16), image, window)
    low_precision("24 products", 2.0 * 24 * 197**2 * 64, torch.bmm, r(24, 197, 64), r(24, 64, 197))
    int8_weights(128, 1024, 2816)
    in_bf16 = onednn_has(torch.bfloat16)
    for sizes in ((128, 1024, 1024), (256, 768, 3072), (1024, 3072, 768), (1024, 768, 50257)):
        if in_bf16:
            in_place(*sizes)
    for depth, columns in ((1024, 1024), (768, 3072), (2816, 1024)):
        for rows in (16, 32, 64, 128, 256, 1024):
            tiles(rows, depth, columns)
            if in_bf16:
                pairs(rows, depth, columns)
    if in_bf16:
        for sizes in CONSTANT:
            constant(*sizes)
    for each in LAYOUTS:
        layout(*each)
    print("\n  rows  depth  columns               MKL   oneDNN dicp_cpu   errors: MKL, oneDNN, dicp_cpu")
    for depth in (256, 1024, 1152, 2048, 2816):
        for rows in (16, 64, 256, 1024):
            product(rows, depth, 1024, turned=False)
    for rows in (256, 1024):
        product(rows, 1024, 1024, turned=True)


if __name__ == "__main__":
    main()
