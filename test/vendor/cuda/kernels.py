"""Kernels for tests: interpreted, run by the meaning of the kernel IR, or compiled for absent GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.backends.compiler import GPUTarget

from dicp.config import Config
from dicp.ir import index as ix
from dicp.ir import interpret
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.ir.kernel import Axis, Kernel, Param, Reduce, Scan, Store, canonical
from dicp.vendor.cuda_graph import codegen, launch
from dicp.vendor.cuda_graph.assemble import programs_function
from dicp.vendor.cuda_graph.module import Source

TARGETS = [GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)]


def load(buffer: str, i: Index, dtype: torch.dtype = torch.float32) -> Expr:
    return Expr("load", (buffer, i), dtype)


def pointwise(expr: Expr, n: int, dtypes: dict[str, torch.dtype], out: torch.dtype | None = None) -> Kernel:
    """out[i] = expr for i < n; expr loads at Var("i", n)."""
    i = Var("i", n)
    params = tuple(Param(name, d, False) for name, d in dtypes.items())
    result = Param("out", out or expr.dtype, True, False)
    return Kernel("test", (Axis(i),), (*params, result), (), (Store("out", ix.of(i), expr),))


def run(
    kernel: Kernel, tensors: Sequence[torch.Tensor], sizes: Sequence[int], config: Config
) -> list[torch.Tensor]:
    """The buffers after the kernel ran in Triton's interpreter."""
    source = codegen.emit(kernel, interpreted=True)
    call = launch.InterpretedKernel(source, launch.load(source, config), programs_function(source))
    buffers = [t.clone() for t in tensors]
    call(False, *buffers, *sizes)
    return buffers


def reference(kernel: Kernel, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """The same by the meaning of each statement, on whole tensors."""
    kernel = canonical(kernel)
    symbols = dict(zip(kernel.sizes, sizes))
    extents = [int(ix.evaluate(a.size, symbols.__getitem__)) for a in kernel.axes]
    env: dict[ix.Atom, torch.Tensor | int] = dict(symbols)
    for k, (axis, n) in enumerate(zip(kernel.axes, extents)):
        env[axis.var] = torch.arange(n).reshape([-1 if d == k else 1 for d in range(len(extents))])
    inner = [k for k, a in enumerate(kernel.axes) if a.reduced]
    buffers = {p.name: t.clone() for p, t in zip(kernel.params, tensors)}
    refs: dict[str, torch.Tensor] = {}

    def atom(a: ix.Atom) -> torch.Tensor | int:
        return value(a.payload) if isinstance(a, ix.Opaque) else env[a]

    def value(e: Expr) -> torch.Tensor:
        return interpret.evaluate(
            e, env.__getitem__, lambda name, i: buffers[name].flatten()[i], refs.__getitem__
        )

    for s in kernel.body:
        full = value(s.value).expand(extents)
        if isinstance(s, Store):
            spot = torch.as_tensor(ix.evaluate(s.index, atom)).expand(extents)
            flat = buffers[s.buffer].view(-1)
            stored = full.to(flat.dtype).flatten()
            if s.mode == "set":
                flat[spot.flatten()] = stored
            else:
                word = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[s.mode]
                flat.scatter_reduce_(0, spot.flatten(), stored, word)
            continue
        refs.update(zip(s.refs, _along(s, full, inner), strict=True))
    return list(buffers.values())


def _along(s: Reduce | Scan, full: torch.Tensor, inner: list[int]) -> list[torch.Tensor]:
    if isinstance(s, Scan):
        dim = inner[0]
        if s.kind.startswith("arg"):
            return list({"argmax": torch.cummax, "argmin": torch.cummin}[s.kind](full, dim))
        words = {"sum": torch.cumsum, "prod": torch.cumprod, "logsumexp": torch.logcumsumexp}
        if s.kind in words:
            return [words[s.kind](full, dim).to(full.dtype)]
        return [{"max": torch.cummax, "min": torch.cummin}[s.kind](full, dim).values]
    rows = full.movedim(inner, list(range(-len(inner), 0))).flatten(-len(inner))
    results = {
        "sum": lambda: [rows.sum(-1, dtype=rows.dtype)],
        "prod": lambda: [rows.prod(-1, dtype=rows.dtype)],
        "max": lambda: [rows.amax(-1)],
        "min": lambda: [rows.amin(-1)],
        "any": lambda: [rows.any(-1)],
        "all": lambda: [rows.all(-1)],
        "argmax": lambda: [rows.argmax(-1)],
        "argmin": lambda: [rows.argmin(-1)],
        "welford": lambda: [rows.mean(-1), rows.var(-1, correction=0) * rows.shape[-1]],
    }[s.kind]()
    shape = [1 if k in inner else n for k, n in enumerate(full.shape)]
    return [r.reshape(shape) for r in results]


def compile_everywhere(
    sources: Sequence[Source], config: Config, targets: Sequence[GPUTarget] = tuple(TARGETS)
) -> int:
    """Compile kernels to binaries; how many there are."""
    count = 0
    for source in sources:
        fn = launch.load(source, config)
        for target in targets:
            compiled = launch.compile_for(source, fn, target)
            assert compiled.asm["cubin"], source.name
            count += 1
    return count
