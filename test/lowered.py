"""Programs for the compiler's own tests: traced from ordinary PyTorch through the real bridge, up to (not including)
code generation. Needs no compiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch.fx import GraphModule, Node

from dicp.compat import autograd
from dicp.config import Config
from dicp.ir import index as ix
from dicp.ir.interpret_kernel import run_kernel
from dicp.ir.kernel import show
from dicp.ops.decompositions import OPENED, decomposition_table
from dicp.ops.library import register
from dicp.passes import run_passes
from dicp.runtime.program import Program, make_program
from dicp.schedule.defs import Buffer, Scatter, View
from dicp.schedule.fuse import fuse
from dicp.schedule.kernels import Launch, build_kernels
from dicp.schedule.lower import lower
from dicp.schedule.memory import plan_memory
from dicp.vendor.base import Machine, Vendor


class Kernels(Vendor):
    """A vendor for tests that claims `names` (op names of aten, "mm") and forms no dicp::* op."""

    name, device = "test", "cpu"

    def __init__(self, claims: Mapping[str, Any] | None = None) -> None:
        self.claims = dict(claims or {})

    def supports(self, target: Any, node: Node) -> bool:
        return False

    def keeps(self, op: Any) -> bool:
        return False

    def machine(self, config: Any) -> Machine:
        return Machine(torch.get_num_threads())

    def claim(self, node: Node, config: Any) -> Any:
        return self.claims.get(str(node.target).removeprefix("aten.").removesuffix(".default"))


def traced(
    fn: Callable[..., Any], *inputs: Any, train: bool = False, dynamic: bool | None = False
) -> dict[str, GraphModule]:
    """The graphs a vendor is given for `fn`, by role; meta["given"] holds the inputs each was run with.

    An input is a shape (float32, random), a tensor or an int.
    """
    found: dict[str, GraphModule] = {}

    def keep(role: str) -> Callable[..., Any]:
        def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
            found[role] = gm
            run = make_boxed_func(gm.forward)

            def record(args: list[Any]) -> Any:
                gm.meta["given"] = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
                return run(args)

            record._boxed_call = True  # type: ignore[attr-defined]
            return record

        return compiler

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return autograd.aot_compile(
            gm,
            example_inputs,
            forward=keep("forward"),
            backward=keep("backward"),
            inference=keep("inference"),
            decompositions=decomposition_table(lambda op: op._opname in OPENED),  # as a vendor that claims them
        )

    torch._dynamo.reset()
    args = [
        torch.randn(i) if isinstance(i, tuple) else i.clone() if isinstance(i, torch.Tensor) else i
        for i in inputs
    ]
    for a in args:
        if train and isinstance(a, torch.Tensor) and a.is_floating_point():
            a.requires_grad_()
    with torch.set_grad_enabled(train):
        out = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
        if train:
            (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
    return found


def program_of(gm: GraphModule, vendor: Any = None, **options: Any) -> Program:
    """Passes, lowering, fusion, kernels and memory plan of a traced graph."""
    register()
    vendor, config = vendor or Kernels(), Config.make(None, options)
    gm = run_passes(gm, vendor, config, None)
    lowered = lower(gm, vendor, config)
    items = build_kernels(fuse(lowered), lowered)
    return make_program("test", lowered, items, plan_memory(items, lowered))


def compiled(
    fn: Callable[..., Any],
    *inputs: Any,
    vendor: Any = None,
    role: str = "inference",
    dynamic: bool | None = False,
    **options: Any,
) -> Program:
    """`program_of` the graph of `fn`."""
    return program_of(
        traced(fn, *inputs, train=role != "inference", dynamic=dynamic)[role], vendor, **options
    )


def text(program: Program) -> str:
    """The kernels, library calls and externs of a program as text, without the user's lines; buffers that lowering
    made are t0, t1, ... by appearance."""
    lines = []
    for item in program.items:
        if isinstance(item, Launch):
            lines += [line.split("    # ")[0] for line in show(item.kernel).splitlines()]
        else:
            outs = ", ".join(b.name for b in item.outputs if b is not None)
            lines.append(f"{outs} = {'library' if item.claim else 'extern'} {item.node.target}")
    seen: dict[str, str] = {}
    return re.sub(r"\bbuf\d+\b", lambda m: seen.setdefault(m[0], f"t{len(seen)}"), "\n".join(lines) + "\n")


def names(program: Program) -> list[str]:
    """What each step fuses, in order."""
    return [i.kernel.name if isinstance(i, Launch) else str(i.node.target) for i in program.items]


# -- running a program by the interpreter ------------------------------------------------------------------------------


class Memory:
    """The flat memory of every buffer of a program (without library calls), bound to real inputs."""

    def __init__(self, program: Program, inputs: Sequence[Any]) -> None:
        self.program, self.lowered = program, program.lowered
        self.alias = {d.outputs[0].name: d.base.name for d in self.lowered.defs if isinstance(d, Scatter)}
        self.sizes: dict[str, int] = {}
        self.flat: dict[str, torch.Tensor] = {}
        for bound, value in zip(self.lowered.inputs, inputs, strict=True):
            self._bind(bound, value)
        for bound, value in zip(self.lowered.inputs, inputs, strict=True):
            if isinstance(bound, Buffer):
                span = self._span(bound)
                self.flat[bound.name] = value.as_strided((span,), (1,)).clone()
        for var, e in self.lowered.symbols.expressions.items():
            if var.name not in self.sizes and all(str(s) in self.sizes for s in e.free_symbols):
                self.sizes[var.name] = int(e.subs({s: self.sizes[str(s)] for s in e.free_symbols}))
        for name, constant in self.lowered.constants.items():
            self.flat[name] = constant.as_strided((self._span(self.lowered.buffers[name]),), (1,)).clone()

    def _bind(self, bound: Any, value: Any) -> None:
        pairs = [(bound, value)]
        if isinstance(bound, Buffer):
            pairs = [
                *zip(bound.shape, value.shape, strict=True),
                *zip(bound.strides, value.stride(), strict=True),
            ]
        for size, actual in pairs:
            if isinstance(size, ix.Poly) and size.is_atom:
                self.sizes.setdefault(size.terms[0][0][0].key, int(actual))

    def number(self, i: Any) -> int:
        return int(ix.evaluate(i, lambda a: self.sizes[a.key]))

    def _span(self, b: Buffer) -> int:
        shape, strides = [self.number(n) for n in b.shape], [self.number(s) for s in b.strides]
        return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))

    def of(self, b: Buffer) -> torch.Tensor:
        name = b.name
        while name in self.alias:
            name = self.alias[name]
        if name not in self.flat:
            fresh = torch.empty(self._span(self.lowered.buffers[name]), dtype=b.dtype)
            self.flat[name] = fresh.fill_(_poison(b.dtype))
        return self.flat[name]

    def bind(self, launch: Launch) -> dict[str, torch.Tensor]:
        """The memory of each parameter of a launch."""
        return {b.name: self.of(b) for b in launch.buffers}

    def outputs(self, inputs: Sequence[Any]) -> list[Any]:
        return [self._output(o, inputs) for o in self.lowered.outputs]

    def _output(self, o: Any, inputs: Sequence[Any]) -> Any:
        if isinstance(o, View):
            memory = self.of(o.buffer)
            return (memory if o.seen_as is None else memory.view(o.seen_as)).as_strided(
                [self.number(n) for n in o.shape], [self.number(s) for s in o.strides], self.number(o.offset)
            )
        if isinstance(o, tuple) and o and o[0] == "input":
            return inputs[o[1]]
        return self.number(o) if isinstance(o, ix.Poly) else o


def _poison(dtype: torch.dtype) -> Any:
    """What memory holds before anything wrote it: a value that spoils every result that reads it."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else 77


def interpret(program: Program, inputs: Sequence[Any]) -> tuple[list[Any], Memory]:
    """Run a program of kernels by the reference interpreter."""
    memory = Memory(program, inputs)
    for launch in program.launches:
        run_kernel(launch.kernel, memory.bind(launch), memory.sizes)
    return memory.outputs(inputs), memory


@contextmanager
def threads(n: int) -> Iterator[None]:
    """A fixed number of threads: reductions are split by it."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
