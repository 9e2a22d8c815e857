"""The meaning of kernels: an interpreter over torch tensors, the reference for generated kernels.

The whole iteration space is evaluated at once: axis k of the kernel is dimension k of every tensor in here,
of size 1 where a value does not depend on the axis. Float reductions are taken in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.interpret import evaluate
from dicp.ir.kernel import Kernel, Reduce, Scan, Store

_BOOL_KINDS = {"sum": "any", "prod": "all", "max": "any", "min": "all"}
_UPDATES = {"mul": "prod", "max": "amax", "min": "amin"}


def run_kernel(
    kernel: Kernel, buffers: Mapping[str, torch.Tensor], sizes: Mapping[str, int] | None = None
) -> None:
    """Run a kernel on its (flat, one-dimensional) buffers, in place.

    sizes: the value of each size symbol. Loads see memory as it was when the kernel began; a statement's own
    updates (+=, max=...) add up. Raises IndexError when an index check fails.
    """
    _Run(kernel, buffers, dict(sizes or {})).run()


class _Run:
    def __init__(self, kernel: Kernel, buffers: Mapping[str, torch.Tensor], sizes: dict[str, int]) -> None:
        self.kernel, self.buffers = kernel, buffers
        self.before = {
            p.name: buffers[p.name].clone() if p.written else buffers[p.name] for p in kernel.params
        }
        self.values: dict[str, int | torch.Tensor] = dict(sizes)
        self.extents = tuple(int(ix.evaluate(a.size, self._atom)) for a in kernel.axes)
        for k, (axis, extent) in enumerate(zip(kernel.axes, self.extents, strict=True)):
            shape = [-1 if d == k else 1 for d in range(len(self.extents))]
            self.values[axis.var.name] = torch.arange(extent).reshape(shape)
        self.inner = tuple(k for k, a in enumerate(kernel.axes) if a.reduced)
        self.refs: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        for s in self.kernel.body:
            if isinstance(s, Store):
                self._store(s)
            else:
                results = self._reduce(s) if isinstance(s, Reduce) else self._scan(s)
                self.refs.update(zip(s.refs, results, strict=True))

    def _atom(self, a: ix.Atom) -> int | torch.Tensor:
        return self.values[a.key]

    def _value(self, e: Expr) -> torch.Tensor:
        return evaluate(e, self._atom, lambda name, at: self.before[name][at], self.refs.__getitem__)

    def _full(self, e: Expr) -> torch.Tensor:
        """The value at every point of the space."""
        return self._value(e).expand(self.extents)

    def _reduce(self, s: Reduce) -> tuple[torch.Tensor, ...]:
        outer = [k for k in range(len(self.extents)) if k not in self.inner]
        rows = self._full(s.value).permute(*outer, *self.inner)
        rows = rows.reshape(*(self.extents[k] for k in outer), math.prod(self.extents[k] for k in self.inner))
        shape = [1 if k in self.inner else n for k, n in enumerate(self.extents)]
        return tuple(r.reshape(shape) for r in reduced(rows, s.kind))

    def _scan(self, s: Scan) -> tuple[torch.Tensor, ...]:
        (line,) = self.inner
        return tuple(r.movedim(-1, line) for r in scanned(self._full(s.value).movedim(line, -1), s.kind))

    def _store(self, s: Store) -> None:
        at = self._index(s.index)
        value = self._value(s.value)
        # Updates happen once at every point of the space, whether or not something depends on each axis.
        shape = self.extents if s.mode != "set" else torch.broadcast_shapes(at.shape, value.shape)
        at, value = at.expand(shape).reshape(-1), value.expand(shape).reshape(-1)
        write(self.buffers[s.buffer], at, value, s.mode)

    def _index(self, i: Index) -> torch.Tensor:
        if isinstance(i, int):
            return torch.tensor(i)
        return self._value(Expr("index", (i,), torch.int64))


def reduced(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, ...]:
    """The results of a reduction of x along its last dimension; a NaN is greater and smaller
    than everything."""
    if kind == "welford":
        wide = x.to(torch.float64)
        mean = wide.mean(-1, keepdim=True)
        return mean[..., 0].to(x.dtype), (wide - mean).square().sum(-1).to(x.dtype)
    if x.dtype == torch.bool:
        kind = _BOOL_KINDS.get(kind, kind)
    if kind in ("any", "all"):
        return ((x != 0).any(-1) if kind == "any" else (x != 0).all(-1),)
    if kind in ("max", "min"):
        return (x.amax(-1) if kind == "max" else x.amin(-1),)
    if kind in ("argmax", "argmin"):
        x = x.to(torch.uint8) if x.dtype == torch.bool else x
        best = x.amax(-1, keepdim=True) if kind == "argmax" else x.amin(-1, keepdim=True)
        here = (x == best) | (x != x)
        return (torch.where(here, torch.arange(x.shape[-1]), x.shape[-1]).amin(-1),)  # the first of equals
    wide = x.to(torch.float64) if x.dtype.is_floating_point else x
    return ((wide.sum(-1) if kind == "sum" else wide.prod(-1)).to(x.dtype),)


def scanned(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, ...]:
    """The results of an inclusive scan of x along its last dimension."""
    if kind.endswith(("max", "min")):
        best, at = (torch.cummax if kind.endswith("max") else torch.cummin)(x, -1)
        return (best, at) if kind.startswith("arg") else (best,)
    fold = {"sum": torch.cumsum, "prod": torch.cumprod, "logsumexp": torch.logcumsumexp}[kind]
    wide = torch.float64 if x.dtype.is_floating_point else torch.int64
    return (fold(x.to(wide), -1).to(x.dtype),)


def write(buffer: torch.Tensor, at: torch.Tensor, value: torch.Tensor, mode: str) -> None:
    """Write or combine flat elements, in order."""
    if mode == "set":  # of two writes to one element, the later counts
        order = torch.full_like(buffer, -1, dtype=torch.int64)
        order.scatter_reduce_(0, at, torch.arange(at.numel()), "amax")
        hit = order >= 0
        buffer[hit] = value[order[hit]].to(buffer.dtype)
        return
    wide = torch.float64 if buffer.dtype.is_floating_point else torch.int64
    if buffer.dtype == torch.bool:
        mode = {"add": "max", "mul": "min"}.get(mode, mode)
    total = buffer.to(wide)
    if mode == "add":
        total.index_add_(0, at, value.to(wide))
    else:
        total.scatter_reduce_(0, at, value.to(wide), _UPDATES[mode])
    buffer.copy_(total.to(buffer.dtype))
