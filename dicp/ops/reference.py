"""An eager Builder for tests: every value a rule makes is evaluated at once, by interpreting its expressions.

`run(graph_module, inputs)` executes an FX graph of aten ops through the rules of the op table, and by eager
calls of the ops that have none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal

import sympy
import torch
from torch.utils._pytree import tree_map

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index
from dicp.ir.interpret import evaluate_all
from dicp.ir.value import Indices, ReduceKind, ScanKind, ScatterMode, Shape, Value
from dicp.ops.table import Declined, Row, table


class Reference:
    """Builder whose values are tensors in memory. `sizes` gives the size symbols."""

    rounds = False

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self.sizes = dict(sizes or {})
        self.buffers: dict[str, torch.Tensor] = {}
        self.externs: set[str] = set()

    # --- between tensors and values

    def input(self, tensor: torch.Tensor, shape: Shape | None = None) -> Value:
        """A value that reads a tensor; `shape` gives its symbolic sizes."""
        name = f"t{len(self.buffers)}"
        self.buffers[name] = tensor.detach()
        dtype = ex.compute_dtype(tensor.dtype)
        return Value(tuple(tensor.shape) if shape is None else shape, tensor.dtype,
                     lambda idx: Expr("at", (name, idx), dtype))

    def evaluate(self, value: Value) -> torch.Tensor:
        """The tensor of a value."""
        grid = self._grid((value.shape,))
        element = value(grid.indices[0])
        return self._compute(grid, (element,))[0].to(value.dtype).contiguous()

    def size(self, n: Index) -> int:
        return int(ix.evaluate(n, lambda a: self.sizes[str(a)]))

    def _grid(self, shapes: tuple[Shape, ...]) -> _Grid:
        return _Grid(shapes, tuple(tuple(self.size(n) for n in shape) for shape in shapes))

    def _compute(self, grid: _Grid, roots: tuple[Expr, ...]) -> tuple[torch.Tensor, ...]:
        """Values of expressions over a grid, each of the grid's full shape."""
        def env(atom: ix.Atom) -> Any:
            return grid.positions[atom] if atom in grid.positions else self.sizes[str(atom)]

        def load(name: str, idx: Any) -> torch.Tensor:
            return self.buffers[name][idx]

        if 0 in grid.shape:
            return tuple(torch.zeros(grid.shape, dtype=r.dtype) for r in roots)
        return tuple(t.expand(grid.shape) for t in evaluate_all(roots, env, load))

    # --- the Builder protocol

    def meta(self, node: Any) -> tuple[Shape, torch.dtype]:
        val = node.meta["val"]
        return tuple(self.index(n) for n in val.shape), val.dtype

    def index(self, value: Any) -> Index:
        if isinstance(value, (int, ix.Poly)):
            return value
        expr = value.node.expr if isinstance(value, torch.SymInt) else value
        try:
            return _from_sympy(expr)
        except Declined:
            symbols = {x: self.sizes[x.name] for x in expr.free_symbols}
            self.sizes[str(expr)] = int(expr.xreplace(symbols))
            return ix.of(ix.Var(str(expr)))

    def realize(self, value: Value) -> Value:
        return self.input(self.evaluate(value), value.shape)

    def kept(self, value: Value) -> Value:
        return value

    def reduce(self, kind: ReduceKind, shape: Shape, extent: Shape, dtype: torch.dtype,
               fn: Callable[[Indices, Indices], Expr]) -> Value:
        grid = self._grid((shape, extent))
        data = self._compute(grid, (fn(*grid.indices),))[0]
        flat = data.reshape((*grid.sizes[0], -1)) if data.numel() else data.reshape(
            (*grid.sizes[0], *([0] if 0 in grid.sizes[1] else [_count(grid.sizes[1])])))
        return self.input(_REDUCE[kind](flat).to(dtype), shape)

    def welford(
        self, shape: Shape, extent: Shape, fn: Callable[[Indices, Indices], Expr]
    ) -> tuple[Value, Value]:
        grid = self._grid((shape, extent))
        data = self._compute(grid, (fn(*grid.indices),))[0].reshape((*grid.sizes[0], _count(grid.sizes[1])))
        mean = data.mean(-1)
        return self.input(mean, shape), self.input((data - mean[..., None]).square().sum(-1), shape)

    def scan(self, kind: ScanKind, shape: Shape, axis: int, dtype: torch.dtype,
             fn: Callable[[Indices], Expr]) -> Value:
        grid = self._grid((shape,))
        data = self._compute(grid, (fn(grid.indices[0]),))[0]
        return self.input(_SCAN[kind](data, axis).to(dtype), shape)

    def arg_scan(self, kind: Literal["max", "min"], shape: Shape, axis: int, dtype: torch.dtype,
                 fn: Callable[[Indices], Expr]) -> tuple[Value, Value]:
        grid = self._grid((shape,))
        data = self._compute(grid, (fn(grid.indices[0]),))[0]
        best, at = (torch.cummax if kind == "max" else torch.cummin)(data, axis)
        return self.input(best.to(dtype), shape), self.input(at, shape)

    def scatter(self, base: Value, extent: Shape, fn: Callable[[Indices], tuple[Indices, Expr]],
                mode: ScatterMode, unique: bool = False) -> Value:
        out = self.evaluate(base).to(ex.compute_dtype(base.dtype)).clone()
        grid = self._grid((extent,))
        target, element = fn(grid.indices[0])
        position = self._compute(grid, (ex.index_value(ix.linearize(target, base.shape)), element))
        where, what = (t.reshape(-1) for t in position)
        assert not unique or where.unique().numel() == where.numel(), "targets are not unique"
        flat = out.reshape(-1)
        if mode == "add" and flat.dtype != torch.bool:
            flat = flat.index_add(0, where, what.to(out.dtype))
        else:
            for at, x in zip(where.tolist(), what.to(out.dtype), strict=True):
                flat[at] = _COMBINE[mode](flat[at], x)
        return self.input(flat.reshape(out.shape).to(base.dtype), base.shape)

    def indirect(self, position: Expr, size: Index, what: str, wrap: bool = True) -> Index:
        checked = Expr(
            "check", (ex.cast(position, torch.int64), ex.index_value(size), int(wrap), 0), torch.int64
        )
        return ix.of(ix.Opaque(checked, size))

    def nonzero(self, divisor: Expr, what: str) -> Expr:
        return Expr("nonzero", (divisor, 0), divisor.dtype)


class _Grid:
    """Loop variables of some shapes, with the positions of each."""

    def __init__(self, shapes: tuple[Shape, ...], sizes: tuple[tuple[int, ...], ...]) -> None:
        self.sizes = sizes
        self.shape = tuple(n for group in sizes for n in group)
        self.positions: dict[ix.Atom, torch.Tensor] = {}
        indices = []
        rank = len(self.shape)
        for group in shapes:
            idx: list[Index] = []
            for n in group:
                axis = len(self.positions)
                var = ix.Var(f"i{axis}", n)
                view = [1] * rank
                view[axis] = -1
                self.positions[var] = torch.arange(self.shape[axis]).view(view)
                idx.append(ix.of(var))
            indices.append(tuple(idx))
        self.indices = indices


def _count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _argbest(pick: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: pick(x.to(torch.int64) if x.dtype == torch.bool else x, -1)


_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: torch.sum(x, -1, dtype=x.dtype),
    "prod": lambda x: torch.prod(x, -1, dtype=x.dtype),
    "max": lambda x: torch.amax(x, -1), "min": lambda x: torch.amin(x, -1),
    "any": lambda x: torch.any(x.bool(), -1), "all": lambda x: torch.all(x.bool(), -1),
    "argmax": _argbest(torch.argmax), "argmin": _argbest(torch.argmin),
}
_SCAN: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda x, d: torch.cumsum(x, d, dtype=x.dtype),
    "prod": lambda x, d: torch.cumprod(x, d, dtype=x.dtype),
    "max": lambda x, d: torch.cummax(x, d)[0], "min": lambda x, d: torch.cummin(x, d)[0],
    "logsumexp": lambda x, d: torch.logcumsumexp(x, d),
}
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "set": lambda old, new: new,
    "add": torch.add,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _from_sympy(x: Any) -> Index:
    """A symbolic integer of torch as an Index."""
    if isinstance(x, sympy.Integer):
        return int(x)
    if isinstance(x, sympy.Symbol):
        return ix.of(ix.Var(x.name, low=2))
    args = [_from_sympy(a) for a in x.args]
    name = type(x).__name__
    if isinstance(x, sympy.Add):
        return sum(args[1:], args[0])
    if isinstance(x, sympy.Mul):
        return ix.product(args)
    if isinstance(x, sympy.Pow) and isinstance(args[1], int) and args[1] >= 0:
        return ix.product([args[0]] * args[1])
    if name in ("FloorDiv", "CleanDiv"):
        return ix.floordiv(args[0], args[1])
    if name in ("Mod", "PythonMod"):
        return ix.mod(args[0], args[1])
    raise Declined(f"symbolic size {x}")


def run(
    g: torch.fx.GraphModule, inputs: list[Any], rows: Mapping[Any, Row] | None = None
) -> tuple[Any, set[str]]:
    """Results of a graph on tensors and sizes, and the ops that ran by eager calls, with the reason."""
    rows = table() if rows is None else rows
    b = Reference()
    env: dict[torch.fx.Node, Any] = {}
    for node, given in zip([n for n in g.graph.nodes if n.op == "placeholder"], inputs, strict=True):
        _bind_sizes(b, node, given)
        env[node] = (
            b.input(given, b.meta(node)[0]) if isinstance(given, torch.Tensor) else b.index(node.meta["val"])
        )
    for node in g.graph.nodes:
        if node.op == "output":
            return torch.fx.map_arg(node.args[0], lambda n: _result(b, env[n])), b.externs
        if node.op == "get_attr":
            attr = getattr(g, str(node.target))
            env[node] = b.input(attr) if isinstance(attr, torch.Tensor) else attr
        elif node.op == "call_function":
            env[node] = _step(b, node, env, rows)
    raise AssertionError("graph without output")


def _bind_sizes(b: Reference, node: torch.fx.Node, given: Any) -> None:
    val = node.meta["val"]
    pairs = zip(val.shape, given.shape, strict=True) if isinstance(given, torch.Tensor) else [(val, given)]
    for symbolic, n in pairs:
        if isinstance(symbolic, torch.SymInt) and isinstance(symbolic.node.expr, sympy.Symbol):
            b.sizes[symbolic.node.expr.name] = int(n)


def _step(b: Reference, node: torch.fx.Node, env: dict[torch.fx.Node, Any], rows: Mapping[Any, Row]) -> Any:
    if isinstance(node.meta.get("val"), (torch.SymInt, int)):
        return b.index(node.meta["val"])
    args = torch.fx.map_arg(node.args, lambda n: env[n])
    kwargs = torch.fx.map_arg(node.kwargs, lambda n: env[n])
    if node.target is operator.getitem:
        return args[0][args[1]]
    if isinstance(node.meta.get("val"), (torch.SymFloat, torch.SymBool, float, bool)):
        return _call(b, node, args, kwargs)
    try:
        if node.target not in rows:
            raise Declined("no row")
        return rows[node.target].lower(b, node, args, kwargs)
    except Declined as e:
        b.externs.add(f"{node.target}: {e}")
        return _call(b, node, args, kwargs)


def _call(b: Reference, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    """The op by eager, on evaluated operands."""
    args, kwargs = tree_map(lambda x: _result(b, x) if isinstance(x, (Value, ix.Poly)) else x, (args, kwargs))
    return tree_map(lambda x: b.input(x) if isinstance(x, torch.Tensor) else x, node.target(*args, **kwargs))


def _result(b: Reference, x: Any) -> Any:
    if isinstance(x, Value):
        return b.evaluate(x)
    if isinstance(x, (tuple, list)):
        return tuple(_result(b, y) for y in x)
    return b.size(x) if isinstance(x, (int, ix.Poly)) else x
