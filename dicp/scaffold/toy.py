"""toy: a kernel vendor in one file. Its "chip" is torch itself: a kernel becomes a
Python function over flat tensors that computes every point of the iteration space at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

import dicp
from dicp.errors import check_error
from dicp.ir import index as ix
from dicp.ir.expr import BINARY, UNARY, Expr, walk
from dicp.ir.index import Index
from dicp.ir.interpret_kernel import reduced, scanned, write
from dicp.ir.kernel import Kernel, Reduce, Store, canonical
from dicp.ir.value import KINDS
from dicp.runtime.program import Program, Segment
from dicp.runtime.runner import Runner
from dicp.schedule.defs import Buffer, Call, View
from dicp.schedule.kernels import Launch
from dicp.vendor.asking import emitted
from dicp.vendor.base import Claim, Machine

aten = torch.ops.aten

# How this vendor spells the scalar primitives.
WORDS: dict[str, str] = {op: f"torch.{op}({{0}})" for op in UNARY}
WORDS |= {op: f"torch.{op}({{0}}, {{1}})" for op in BINARY}
for letter, family in (("l", "logical"), ("b", "bitwise")):
    WORDS |= {f"{letter}{op}": f"torch.{family}_{op}({{0}}, {{1}})" for op in ("and", "or", "xor")}
    WORDS[f"{letter}not"] = f"torch.{family}_not({{0}})"
WORDS |= dict.fromkeys(("where", "masked"), "torch.where({0}, {1}, {2})")
WORDS |= {f"div_{how}": f"torch.div({{0}}, {{1}}, rounding_mode={how!r})" for how in ("trunc", "floor")}
WORDS |= {
    f"sh{d}": f"torch.bitwise_{side}_shift({{0}}, {{1}})" for d, side in (("l", "left"), ("r", "right"))
}
WORDS |= {"fma": "{0} * {1} + {2}", "round_even": "torch.round({0})"}


def grid(*extents: int) -> list[torch.Tensor]:
    return list(torch.meshgrid(*map(torch.arange, extents), indexing="ij"))


def load(b: torch.Tensor, at: Any) -> torch.Tensor:
    """Positions outside are those a mask rules out: any element will do."""
    return b[torch.as_tensor(at).clamp(0, b.numel() - 1)]


def check(at: torch.Tensor, size: torch.Tensor, wrap: int, message: str) -> torch.Tensor:
    at = torch.where(at < 0, at + size, at) if wrap else at
    if bool(((at < 0) | (at >= size)).any()):
        raise check_error(message)
    return at


def nonzero(x: torch.Tensor, message: str) -> torch.Tensor:
    if bool((x == 0).any()):
        raise check_error(message)
    return x


def reduce(inner: int, x: torch.Tensor, kind: str) -> tuple[torch.Tensor, ...]:
    """Results of a reduction over the last `inner` axes, at every point."""
    keep = x.shape[: x.dim() - inner]
    rows = x.reshape(*keep, math.prod(x.shape[x.dim() - inner :]))
    return tuple(r.reshape(*keep, *[1] * inner).expand(x.shape) for r in reduced(rows, kind))


def store(b: torch.Tensor, at: Any, value: torch.Tensor, shape: tuple[int, ...], mode: str) -> None:
    at = torch.as_tensor(at)
    write(b, at.expand(shape).reshape(-1), value.expand(shape).reshape(-1), mode)


RUNTIME: dict[str, Any] = {f.__name__: f for f in (grid, load, check, nonzero, reduce, scanned, store)}
RUNTIME |= {"torch": torch, "constant": torch.tensor}


def emit(kernel: Kernel, name: str) -> str:
    """The kernel as a Python function."""
    k = canonical(kernel)
    names: dict[Expr, str] = {}
    shape = f"({''.join(place(a.size, names) + ', ' for a in k.axes)})"
    axes = ", ".join(a.var.name for a in k.axes)
    lines = [f"({axes},) = grid{shape}"] if axes else []
    stores = []
    for s in k.body:
        target = [Expr("index", (s.index,), torch.int64)] if isinstance(s, Store) else []
        for x in walk(s.value, *target):
            if x not in names and x not in target:
                names[x] = x.args[0] if x.op == "ref" else f"v{len(names)}"
                lines += [f"{names[x]} = {spelled(x, names)}"] if x.op != "ref" else []
        if isinstance(s, Store):  # after every load: a load sees memory as the kernel found it
            stores.append(
                f"store({s.buffer}, {place(s.index, names)}, {names[s.value]}, {shape}, {s.mode!r})"
            )
        else:
            how = f"reduce({len(k.inner)}, " if isinstance(s, Reduce) else "scanned("
            lines.append(f"({', '.join(s.refs)},) = {how}{names[s.value]}.expand{shape}, {s.kind!r})")
    params = [p.name for p in k.params] + [v.name for v in k.sizes] + ["messages"]
    return "\n    ".join([f"def {name}({', '.join(params)}):", *lines, *stores]) + "\n"


def spelled(x: Expr, names: dict[Expr, str]) -> str:
    args = [names[a] if isinstance(a, Expr) else a for a in x.args]
    if x.op == "const":
        value = f"float({str(args[0])!r})" if x.dtype.is_floating_point else args[0]
        return f"constant({value}, dtype={x.dtype})"
    if x.op == "index":
        return f"torch.as_tensor({place(x.args[0], names)})"
    if x.op == "load":
        return f"load({args[0]}, {place(x.args[1], names)}).to({x.dtype})"
    if x.op == "cast":
        return f"{args[0]}.to({x.dtype})"
    if x.op == "round":
        return f"{args[0]}.to({args[1]}).to({x.dtype})"
    if x.op == "check":
        return f"check({args[0]}, {args[1]}, {args[2]}, messages[{args[3]}])"
    if x.op == "nonzero":
        return f"nonzero({args[0]}, messages[{args[1]}])"
    return WORDS[x.op].format(*args)


def place(i: Index, names: dict[Expr, str]) -> str:
    """An index as Python."""
    if isinstance(i, int):
        return str(i)

    def atom(a: Any) -> str:
        if isinstance(a, (ix.Div, ix.Mod)):
            return f"(({place(a.num, names)}) {a.symbol} ({place(a.den, names)}))"
        return names[a.payload] if isinstance(a, ix.Opaque) else str(a.name)

    return " + ".join("*".join([str(c), *map(atom, mono)]) for mono, c in i.terms)


class ToyRunner(Runner):
    """Writes the program's Python function: a kernel is called on flat windows, a claim writes its
    own line."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, {})
        self.kernels = program.kernel_names()

    def _native(self, segment: Segment) -> None:
        for item in segment.items:
            if isinstance(item, Launch):
                sizes = [v.name for v in item.kernel.sizes]
                args = [*map(self.flat, item.buffers), *sizes, f"MESSAGES[{item.first_check}:]"]
                self.lines.append(f"{self.kernels[item.kernel.digest]}({', '.join(args)})")
            else:
                self.claimed(item)

    def flat(self, b: Buffer) -> str:
        return self.view(View(b, (0 if 0 in b.shape else b.span,), (1,)))


def emit_out(writer: ToyRunner, call: Call) -> None:
    """torch.mm(a, b, out=c), and the like."""
    args = [*map(writer.value, call.args), f"out={writer.into(call.outputs[0])}"]
    writer.line(f"torch.{call.node.target._opname}({', '.join(args)})", call.note)


def emit_new(writer: ToyRunner, call: Call) -> None:
    """A call that allocates its result."""
    args = ", ".join(map(writer.value, call.args))
    writer.line(f"result = torch.ops.aten.{call.node.target._opname}({args})", call.note)
    writer.keep(call, "result")


CLAIMS = {op: Claim(op._opname, emit_out, out=True) for op in (aten.mm.default, aten.bmm.default)}
CLAIMS[aten.convolution.default] = Claim("convolution", emit_new)


class Toy:
    """See dicp.vendor.base.Vendor."""

    name, device = "toy", "cpu"
    words = frozenset(WORDS) | KINDS | {"scan"}

    def available(self, config: Any) -> str | None:
        return None

    def supports(self, target: Any, node: fx.Node) -> bool:
        return False

    def keeps(self, op: Any) -> bool:
        return op in CLAIMS

    def claim(self, node: fx.Node, config: Any) -> Claim | None:
        return CLAIMS.get(node.target)

    def machine(self, config: Any) -> Machine:
        return Machine(threads=1)

    def fingerprint(self, config: Any) -> str:
        return "toy 1"

    def assemble(self, program: Program, config: Any) -> Callable[[list[Any]], Any]:
        program.sources = {"kernels.py": "\n".join(emitted(program, emit).values())}
        runner = ToyRunner(program)
        runner.globals |= RUNTIME | {"MESSAGES": program.lowered.checks}
        exec(program.sources["kernels.py"], runner.globals)
        call = runner.function()
        program.sources["call.py"] = runner.source
        return call


vendor = Toy()
backend = dicp.backend(vendor)
