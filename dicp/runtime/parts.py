"""The Python function of a graph that a vendor's toolchain compiled in parts: those, and aten calls between.

    def call(args):
        if forward_ad._current_level >= 0: refuse_tangents(args)
        arg0, arg1, = args
        args.clear()
        v0, = results(part0(arg0, arg1), due_7, 'toy')
        v1 = op_3(v0)    # model.py:12  torch.linalg.svdvals(h)
        v2, = results(part1(v1), due_9, 'toy')
        return (v2, )
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.config import Config
from dicp.errors import UnsupportedOp, VendorError
from dicp.ir.memory_order import order_of
from dicp.ir.printer import op_name, show, user_location
from dicp.ops.aliases import base_of
from dicp.passes.facts import writes_input
from dicp.runtime.artifact import Artifact
from dicp.runtime.function import FIRST_GLOBALS, FIRST_LINE, make_function
from dicp.runtime.marked_tensors import plain
from dicp.runtime.program import Program
from dicp.runtime.support import expect
from dicp.runtime.verification import Checked, Due, maker
from dicp.schedule.defs import Call, Lowered
from dicp.schedule.memory import MemoryPlan
from dicp.schedule.partition import Part, is_size
from dicp.schedule.strides import dense_strides
from dicp.schedule.traced import may_be_marked
from dicp.vendor.asking import remedy
from dicp.vendor.base import Claim, GraphVendor


def assemble_parts(
    name: str, gm: fx.GraphModule, steps: list[Part | fx.Node], vendor: GraphVendor, config: Config
) -> tuple[Program, Callable[[list[Any]], Any]]:
    """Have the vendor build each part; the function that runs all steps on a (boxed) list of inputs.

    The program lists the parts as library calls and the other calls as externs. Raises UnsupportedOp where
    strict mode forbids those, and what the vendor's `build` raises.
    """
    program = Program(name, Lowered(), [], MemoryPlan())
    writer = _Writer(gm, steps)
    for step in steps:
        if isinstance(step, Part):
            claim = Claim(f"{vendor.name}: part of {step.calls} calls", lambda writer, call: None)
            program.items.append(Call((), "", step.outputs[-1], claim=claim))
            program.sources[f"part{step.number}.txt"] = show(step.gm, locations=True)
            run = vendor.build(step.gm, config)
            if not callable(run):
                what = f"{vendor.name}.build gave {run!r}, which is no function of the graph's inputs"
                raise VendorError(what, todo=remedy(vendor))
            due = [Due.of(n) for n in step.outputs]
            writer.part(step, Checked(run, due, _label(step, vendor.name)))
            continue
        writer.call(step)
        if step.target is not operator.getitem and not is_size(step) and not writes_input(step):
            why = "its toolchain does not take it"
            if config.strict:
                raise unsupported(step, vendor.name, why)
            note = f"{op_name(step.target)}    {user_location(step) or ''}"
            program.items.append(Call((), note, step, why=why))
    call = writer.function(name)
    program.sources["call.py"] = writer.source
    program.save = lambda: Artifact.of(name, writer.source, writer.globals, vendor.name)
    return program, call


def unsupported(node: fx.Node, vendor: str, why: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"{node.target}: {vendor} has no code for this op ({why})",
        where=user_location(node) or (),
        todo="drop options={'strict': True} to run it as an extern aten call",
    )


class _Writer:
    def __init__(self, gm: fx.GraphModule, steps: list[Part | fx.Node]) -> None:
        self.results: list[Any] = list(gm.graph.output_node().args[0])
        self.inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.names = {n: f"arg{k}" for k, n in enumerate(self.inputs)}
        self.globals = {**FIRST_GLOBALS, "expect": expect, "in_order": _in_order, "plain": plain}
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                self.names[node] = self._global("constant", getattr(gm, str(node.target)))
        self.writes = [s for s in steps if isinstance(s, fx.Node) and writes_input(s)]
        self.old: dict[fx.Node, str] = {}  # copies of what shares the memory of an overwritten input
        self.lines = [FIRST_LINE]
        if self.inputs:
            self.lines.append(f"{', '.join(self.names[n] for n in self.inputs)}, = args")
        self.lines.append("args.clear()")
        self.step, self.last = 0, self._last_steps(steps)

    def part(self, part: Part, run: Callable[..., Sequence[Any]]) -> None:
        names = [self._name(n) for n in part.outputs]
        self.globals[f"part{part.number}"] = run
        args = ", ".join(
            f"plain({self.names[n]})" if may_be_marked(n) else self.names[n] for n in part.inputs
        )
        self.lines.append(f"{', '.join(names)}, = part{part.number}({args})")
        for node, name in zip(part.outputs, names, strict=True):
            if isinstance(node.meta["val"], torch.Tensor):
                self.lines.append(f"{name} = {self._as_traced(name, node.meta['val'])}")
        self._free()

    def call(self, node: fx.Node) -> None:
        if self.writes and node is self.writes[0]:
            self._keep_old_values()
        args = [self._text(a) for a in node.args] + [f"{k}={self._text(a)}" for k, a in node.kwargs.items()]
        if node in self.writes:
            args[1] = self.old.get(node.args[1], args[1])  # type: ignore[arg-type]
        where = user_location(node)
        comment = f"    # {where}" if where else ""
        target = self._global("op", node.target)
        self.lines.append(f"{self._name(node)} = {target}({', '.join(args)}){comment}")
        self._free()

    def function(self, name: str) -> Callable[[list[Any]], Any]:
        results = [
            self.old[r] if r in self.old and r not in self.inputs else self._text(r) for r in self.results
        ]
        self.lines.append(f"return ({''.join(r + ', ' for r in results)})")
        self.source = "def call(args):\n" + "\n".join("    " + line for line in self.lines) + "\n"
        return make_function(name, self.source, self.globals)

    def _keep_old_values(self) -> None:
        written = {w.args[0] for w in self.writes}
        for node in dict.fromkeys([*(w.args[1] for w in self.writes), *self.results]):
            if isinstance(node, fx.Node) and node not in self.writes and base_of(node) in written:
                self.old[node] = f"old{len(self.old)}"
                self.lines.append(f"{self.old[node]} = {self.names[node]}.clone()")

    def _as_traced(self, name: str, val: torch.Tensor) -> str:
        """The result with the strides that the graph was traced with, which what follows may rely on."""
        if all(isinstance(n, int) for n in (*val.shape, *val.stride())):
            return f"expect({name}, {tuple(val.shape)}, {tuple(val.stride())})"
        return f"in_order({name}, {order_of(val)})"

    def _last_steps(self, steps: list[Part | fx.Node]) -> dict[int, list[fx.Node]]:
        """What is read for the last time by each step."""
        last: dict[fx.Node, int] = {}
        for k, step in enumerate(steps):
            reads = step.inputs if isinstance(step, Part) else [*step.all_input_nodes, step]
            last.update(dict.fromkeys([*reads, *(step.outputs if isinstance(step, Part) else ())], k))
        kept = {r for r in self.results if isinstance(r, fx.Node)}
        kept |= {a for w in self.writes for a in w.all_input_nodes}
        out: dict[int, list[fx.Node]] = {}
        for node, k in last.items():
            if node not in kept and node.op != "get_attr":
                out.setdefault(k, []).append(node)
        return out

    def _free(self) -> None:
        dead = self.last.get(self.step, [])
        if dead:
            self.lines.append(f"del {', '.join(self.names[n] for n in dead)}")
        self.step += 1

    def _name(self, node: fx.Node) -> str:
        return self.names.setdefault(node, f"v{len(self.names) - len(self.inputs)}")

    def _global(self, kind: str, value: Any) -> str:
        name = f"{kind}_{len(self.globals)}"
        self.globals[name] = value
        return name

    def _text(self, a: Any) -> str:
        if isinstance(a, fx.Node):
            return self.names[a]
        if isinstance(a, (list, tuple)):
            inner = "".join(self._text(x) + ", " for x in a)
            return f"[{inner}]" if isinstance(a, list) else f"({inner})"
        if isinstance(a, dict):
            return "{" + ", ".join(f"{k!r}: {self._text(v)}" for k, v in a.items()) + "}"
        return repr(a) if a is None or isinstance(a, (bool, int, str)) else self._global("value", a)


def _label(part: Part, vendor: str) -> str:
    calls = [n for n in part.gm.graph.nodes if n.op == "call_function"]
    first, last = (maker(n) for n in (calls[0], calls[-1]))
    return f"{vendor}: part {part.number} ({part.calls} calls, from {first} to {last})"


def _in_order(t: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """t with its dims lying in memory in that order, outermost first."""
    shape = tuple(t.shape)
    return expect(t, shape, dense_strides(shape, order))  # type: ignore[arg-type]
