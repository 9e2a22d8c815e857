"""The compiled form of a graph: an explicit list of steps, and the Python function that runs it.

alloc     outputs (torch's allocator) and one arena block for every temporary
native    a run of kernels and library calls, one call into generated code
extern    an aten call made from Python, counted
free      library results after their last use
return
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp.compat import empty_strided_cpu, tensors_from_handles
from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.ir.printer import user_location
from dicp.runtime.arena import ARENA
from dicp.runtime.host import host_number, host_size
from dicp.schedule.defs import Buffer, Call, Host, Lowered, Raw, View, views
from dicp.schedule.kernels import Item, Launch
from dicp.schedule.memory import Plan, touched


@dataclass(eq=False)
class Segment:
    """Consecutive native items. `allocs`, `frees`: by position in `items`, the roots to allocate before it
    (of the plan's heap), and those to free after it. `kept`: library results, and heap, that later steps or
    the caller need. `late`: those of them whose sizes are known only from the tensor; the call that makes
    them is the segment's last item."""

    number: int
    items: list[Item] = field(default_factory=list)
    allocs: dict[int, list[str]] = field(default_factory=dict)
    frees: dict[int, list[str]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Program:
    """Everything a vendor needs to emit and run a graph."""

    name: str
    lowered: Lowered
    items: list[Item]
    plan: Plan
    steps: list[Segment | Call] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)  # generated, by file name
    build_stats: Any = None
    save: Callable[[], Any] | None = None  # makes the Artifact; None: the vendor's results cannot be saved
    owned: Set[str] = frozenset()  # inputs that nobody else holds
    where: dict[int, int] = field(default_factory=dict)  # item -> step

    @property
    def launches(self) -> list[Launch]:
        return [i for i in self.items if isinstance(i, Launch)]

    @property
    def library_calls(self) -> list[Call]:
        return [i for i in self.items if isinstance(i, Call) and i.claim is not None]

    @property
    def externs(self) -> list[Call]:
        return [c for c in self.python_calls if not c.host]

    @property
    def python_calls(self) -> list[Call]:
        """What the Python function does itself between segments: externs, and reads and checks of numbers."""
        return [i for i in self.items if isinstance(i, Call) and i.claim is None]

    def sizes(self) -> list[Var]:
        """Size symbols that native code may name, in a fixed order."""
        found: dict[str, Var] = {}

        def note(i: Index) -> None:
            for a in ix.atoms(i):
                if isinstance(a, Var) and a.size is None:
                    found[a.name] = a

        for b in self.lowered.buffers.values():
            for n in (*b.shape, *b.strides):
                note(n)
        for launch in self.launches:
            found.update({size.name: size for size in launch.kernel.sizes})
        for call in self.library_calls:
            for v in views((call.args, call.kwargs)):
                for n in (*v.shape, *v.strides, v.offset):
                    note(n)
            for n in _indices((call.args, call.kwargs)):
                note(n)
        note(self.plan.size)
        return [found[n] for n in sorted(found)]


RELEASE_BYTES = 2 << 20  # inputs that are dead but held, above which a backward stops to let them go


def make_program(
    name: str, lowered: Lowered, items: list[Item], plan: Plan, owned: Set[str] = frozenset()
) -> Program:
    """Cut the items into native segments and extern calls, and decide what outlives a segment.

    owned: inputs that nobody else holds (saved activations of a backward). A segment ends where enough of
    them are dead, and they are freed there: activations shrink while gradients grow, as in eager.
    """
    program = Program(name, lowered, items, plan, owned=owned)
    dying = _dying_inputs(lowered, plan, owned)
    where: dict[int, int] = {}
    known = {s for b in lowered.inputs if b is not None for s in _unbacked(lowered, b)}
    dead = 0
    for k, item in enumerate(items):
        last = program.steps[-1] if program.steps else None
        if isinstance(item, Call) and item.claim is None:
            program.steps.append(item)
        elif isinstance(last, Segment) and dead < RELEASE_BYTES and not last.late:
            last.items.append(item)
        else:
            program.steps.append(Segment(sum(isinstance(s, Segment) for s in program.steps), [item]))
            dead = 0
        if isinstance(item, Call):
            late = _sized_late(lowered, item, known)
            if item.claim is not None:
                program.steps[-1].late += late  # type: ignore[union-attr]
        dead += dying.get(k, 0)
        where[k] = len(program.steps) - 1
    program.where = where
    returned = {plan.find(v.buffer.name) for v in views(lowered.outputs)}
    position = {id(item): k for k, item in enumerate(items)}
    heap: dict[int, list[str]] = {}
    for name, k in plan.heap.items():
        heap.setdefault(k, []).append(name)
    for step in program.steps:
        if not isinstance(step, Segment):
            continue
        for at, item in enumerate(step.items):
            k = position[id(item)]
            if k in heap:
                step.allocs[at] = heap[k]
            for name in (*heap.get(k, ()), *_library_results(item)):
                final = plan.last_use.get(name, k)
                outlives = name in returned or where.get(final, -1) != where[k]
                if name in step.late or outlives:
                    step.kept.append(name)
                else:
                    step.frees.setdefault(at + final - k, []).append(name)
    return program


def _library_results(item: Item) -> list[str]:
    outputs = item.outputs if isinstance(item, Call) else ()
    return [b.name for b in outputs if b is not None and b.kind == "library"]


def _sized_late(lowered: Lowered, call: Call, known: set[Any]) -> list[str]:
    """The results of a call whose sizes no earlier step knows; adds those sizes to `known`."""
    late = []
    for r in call.results:
        new = set() if r is None else _unbacked(lowered, r) - known
        if new and isinstance(r, Buffer):
            late.append(r.name)
    known.update(s for r in call.results if r is not None for s in _unbacked(lowered, r))
    return late


def _unbacked(lowered: Lowered, x: Any) -> set[Any]:
    """The sizes read from data that a buffer's geometry, or a number, is made of."""
    numbers = [*x.shape, *x.strides] if isinstance(x, Buffer) else [x] if isinstance(x, ix.Poly) else []
    return {s for n in numbers for s in lowered.symbols.unbacked(n)}


def _dying_inputs(lowered: Lowered, plan: Plan, owned: Set[str]) -> dict[int, int]:
    """Bytes of owned inputs whose last use each item is."""
    out: dict[int, int] = {}
    for b in lowered.inputs:
        if isinstance(b, Buffer) and b.name in owned & plan.last_use.keys() and isinstance(b.nbytes, int):
            k = plan.last_use[b.name]
            out[k] = out.get(k, 0) + b.nbytes
    return out


def _indices(x: Any) -> list[Index]:
    if isinstance(x, ix.Poly):
        return [x]
    if isinstance(x, (list, tuple)):
        return [i for item in x for i in _indices(item)]
    if isinstance(x, dict):
        return [i for item in x.values() for i in _indices(item)]
    return []


@dataclass(eq=False)
class NativeSegment:
    """What a vendor made of a Segment: `run(*ints)` takes the buffers' addresses in the order of
    `arguments`, then the arena's (when `arena`), then that of `slots` words (when there are any), then the
    sizes. The words are the handles of `kept`, or after a failed call its operands, which `fail` takes."""

    run: Callable[..., int]
    arguments: list[str]
    arena: bool
    kept: list[str]
    slots: int
    fail: Callable[..., None]


class Runner:
    """Writes and holds the Python function of a program."""

    def __init__(self, program: Program, natives: dict[int, NativeSegment]) -> None:
        self.program, self.natives = program, natives
        self.lowered, self.plan = program.lowered, program.plan
        self.symbols = program.sizes()
        self.bound: set[str] = set()
        self.names: dict[str, str] = {}  # buffer root -> Python tensor name
        self.globals: dict[str, Any] = {
            "empty_strided": empty_strided_cpu,
            "ARENA": ARENA,
            "slots": _slots,
            "steal": tensors_from_handles,
            "expect": _expect,
            "bounds": slice_bounds,
            "torch": torch,
        }
        self.lines: list[str] = []

    def function(self) -> Callable[[list[Any]], Any]:
        self.source = self._write()
        return make_function(self.program.name, self.source, self.globals)

    # -- writing -------------------------------------------------------------------------------------------

    def _write(self) -> str:
        self._inputs()
        self._take_arena()
        for name, buffer in self.lowered.buffers.items():
            if buffer.kind == "constant":
                self.names[name] = name
                self.globals[name] = self.lowered.constants[name]
        last_step = self._last_steps()
        for k, step in enumerate(self.program.steps):
            if isinstance(step, Segment):
                for item in step.items:
                    for buffer in touched(item)[1]:
                        self._need(buffer)
                self._native(step)
            elif step.host:
                self._host_step(step)
            else:
                self._extern(step)
            self._release([n for n, last in last_step.items() if last == k])
        self._give_arena()
        self.lines.append(f"return ({''.join(self._output(o) + ', ' for o in self.lowered.outputs)})")
        return "def call(args):\n" + "\n".join("    " + line for line in self.lines) + "\n"

    def _last_steps(self) -> dict[str, int]:
        """The step after which nobody needs a tensor that Python holds: library results, heap, externs, owned
        inputs."""
        kinds, owned = ("library", "extern"), self.program.owned
        steps = len(self.program.steps)
        return {
            name: self.program.where[item]
            for name, item in self.plan.last_use.items()
            if (self.lowered.buffers[name].kind in kinds or name in self.plan.heap or name in owned)
            and self.program.where.get(item, steps) < steps - 1
        }

    def _release(self, roots: Sequence[str]) -> None:
        returned = {self.names.get(self.plan.find(v.buffer.name)) for v in views(self.lowered.outputs)}
        returned |= {f"arg{o[1]}" for o in self.lowered.outputs if isinstance(o, tuple)}
        dead = [self.names[n] for n in roots if n in self.names and self.names[n] not in returned]
        if dead:
            self.lines.append(f"del {', '.join(dead)}")

    def _take_arena(self) -> None:
        if self.plan.offset:
            self.lines.append(f"block = ARENA.take({self._text(self.plan.size)})")

    def _give_arena(self) -> None:
        if self.plan.offset:
            self.lines.append("ARENA.give(block)")

    def _need(self, buffer: Buffer) -> None:
        """Torch memory for a result that has none yet; its sizes are known by now."""
        if (
            buffer.kind == "output"
            and self.plan.find(buffer.name) == buffer.name
            and buffer.name not in self.names
        ):
            self.names[buffer.name] = buffer.name
            self._allocate(buffer.name, buffer)

    def _allocate(self, name: str, buffer: Buffer) -> None:
        self.lines.append(
            f"{name} = empty_strided({self._tuple(buffer.shape)}, {self._tuple(buffer.strides)}, "
            f"{buffer.dtype})"
        )

    def _inputs(self) -> None:
        names = [f"arg{k}" for k in range(len(self.lowered.inputs))]
        if names:
            self.lines.append(f"{', '.join(names)}, = args")
        self.lines.append("args.clear()")
        needed = {v.name for v in self.symbols} | {v.name for v in self._python_symbols()}
        for arg, bound in zip(names, self.lowered.inputs, strict=True):
            if isinstance(bound, Buffer):
                self.names[bound.name] = arg
            elif isinstance(bound, Raw):
                self.names[bound.name] = arg
            elif isinstance(bound, ix.Poly) and bound.is_atom:
                self._bind(bound, arg, needed)
        for arg, bound in zip(names, self.lowered.inputs, strict=True):
            if isinstance(bound, Buffer):
                for d, n in enumerate(bound.shape):
                    if isinstance(n, ix.Poly) and n.is_atom:
                        self._bind(n, f"{arg}.size({d})", needed)
                for d, n in enumerate(bound.strides):
                    if isinstance(n, ix.Poly) and n.is_atom:
                        self._bind(n, f"{arg}.stride({d})", needed)
        self._host_sizes(needed)

    def _python_symbols(self) -> list[Var]:
        found: dict[str, Var] = {}
        stack: list[Any] = [
            self.lowered.outputs,
            [(c.args, c.kwargs, views((c.args, c.kwargs))) for c in self.program.python_calls],
        ]
        while stack:
            x = stack.pop()
            if isinstance(x, (list, tuple)):
                stack += list(x)
            elif isinstance(x, dict):
                stack += list(x.values())
            elif isinstance(x, View):
                stack += [*x.shape, *x.strides, x.offset]
            elif isinstance(x, ix.Poly):
                found.update({a.name: a for a in ix.atoms(x) if isinstance(a, Var)})
            elif isinstance(x, Host):
                found.update({str(e): self.lowered.symbols._symbol(e) for e in x.expr.free_symbols})
        extra: dict[str, Var] = {}
        for v in [*found.values(), *self.symbols]:  # symbols that host-computed sizes are made of
            e = self.lowered.symbols.expressions.get(v)
            if e is not None:
                for s in e.free_symbols:
                    if s in self.lowered.symbols.backed:
                        extra[str(s)] = self.lowered.symbols.backed[s]
                    else:
                        extra[str(s)] = self.lowered.symbols._symbol(s)
        return [*found.values(), *extra.values()]

    def _bind(self, n: ix.Poly, source: str, needed: set[str]) -> None:
        name = n.terms[0][0][0].key
        if (
            name in needed
            and name not in self.bound
            and name.isidentifier()
            and isinstance(n.terms[0][0][0], Var)
            and n.terms[0][0][0] not in self.lowered.symbols.host.values()
        ):
            self.bound.add(name)
            self.lines.append(f"{name} = {source}")

    def _host_sizes(self, needed: set[str]) -> None:
        """Sizes that are not polynomials, computed here from those bound so far."""
        symbols = self.lowered.symbols
        for expr, var in symbols.host.items():
            if (
                var.name in needed
                and var.name not in self.bound
                and all(str(s) in self.bound for s in expr.free_symbols)
            ):
                text = host_size(expr, self.globals, f"size_{var.name}")
                self.lines.append(f"{var.name} = {text}")
                self.bound.add(var.name)

    def _native(self, segment: Segment) -> None:
        native = self.natives[segment.number]
        n = segment.number
        args = [f"{self._tensor_name(a)}.data_ptr()" for a in native.arguments]
        if native.arena:
            args.append("block.address")
        if native.slots:
            self.lines.append(f"kept{n} = slots({native.slots})")
            args.append(f"kept{n}[1]")
        args += [v.name if v.name in self.bound else "0" for v in self.symbols]
        self.globals[f"native{n}"], self.globals[f"fail{n}"] = native.run, native.fail
        self.lines.append(f"code = native{n}({', '.join(args)})")
        self.lines.append(f"if code: fail{n}(code{f', kept{n}[0]' if native.slots else ''})")
        if native.kept:
            self.names.update({name: name for name in native.kept})
            first = "" if len(native.kept) == native.slots else f"[:{len(native.kept)}]"
            self.lines.append(f"{', '.join(native.kept)}, = steal(kept{n}[0]{first})")
        for name in segment.late:
            self._measure(self.lowered.buffers[name])

    def _measure(self, b: Buffer) -> None:
        """Bind the sizes that are known from this tensor alone, and have it lie as planned."""
        for d, n in enumerate(b.shape):
            if isinstance(n, ix.Poly) and n.is_atom:
                self._bind(n, f"{b.name}.size({d})", {n.terms[0][0][0].key})
        self._host_sizes({v.name for v in (*self.symbols, *self._python_symbols())})
        self.lines.append(f"{b.name} = expect({b.name}, {self._tuple(b.shape)}, {self._tuple(b.strides)})")

    def _tensor_name(self, name: str) -> str:
        return self.names[self.plan.find(name)] if self.plan.find(name) in self.names else self.names[name]

    def _host_step(self, call: Call) -> None:
        """A number read from a tensor, the bounds of a slice, or a condition that must hold."""
        args = [self._argument(a) for a in call.args]
        where = user_location(call.node)
        comment = f"    # {where}" if where else ""
        if call.node.target is torch.ops.aten._assert_scalar.default:
            self.lines.append(f"if not {args[0]}: raise RuntimeError({args[1]}){comment}")
            return
        if call.node.target is torch.ops.aten.slice.Tensor:
            n, start, end, step, offset, stride = args
            self.lines.append(f"begin, length = bounds({n}, {start}, {end}, {step}){comment}")
            sources: tuple[str, ...] = ("length", "begin", f"{offset} + begin * {stride}")
        else:
            sources = (f"{args[0]}.item()",)
        for number, source in zip(call.results, sources, strict=True):
            if isinstance(number, ix.Poly) and number.is_atom:
                self._bind(number, source, {number.terms[0][0][0].key})
        self._host_sizes({v.name for v in (*self.symbols, *self._python_symbols())})

    def _extern(self, call: Call) -> None:
        target = f"op_{len(self.globals)}"
        self.globals[target] = call.node.target
        args = [self._argument(a) for a in call.args] + [
            f"{k}={self._argument(v)}" for k, v in call.kwargs.items()
        ]
        where = user_location(call.node)
        comment = f"    # {where}" if where else ""
        self.lines.append(f"result = {target}({', '.join(args)}){comment}")
        many = isinstance(call.node.meta.get("val"), (tuple, list))
        copies = _returns_alias(call.node.target)
        for k, b in enumerate(call.results):
            source = f"result[{k}]" if many else "result"
            if isinstance(b, Buffer):
                self.names[b.name] = b.name
                # a view of arena memory would change under the reader's feet
                self.lines.append(f"{b.name} = {source}.clone()" if copies else f"{b.name} = {source}")
                self._measure(b)
            elif isinstance(b, Raw):
                self.names[b.name] = b.name
                self.lines.append(f"{b.name} = {source}")
            elif isinstance(b, ix.Poly) and b.is_atom:
                self._bind(b, source, {b.terms[0][0][0].key})

    def _argument(self, a: Any) -> str:
        if isinstance(a, View):
            return self._view(a)
        if isinstance(a, Raw):
            return self.names[a.name]
        if isinstance(a, Host):
            return host_number(a.expr, self.globals, f"host_{len(self.globals)}")
        if isinstance(a, ix.Poly):
            return self._text(a)
        if isinstance(a, (list, tuple)):
            inner = "".join(self._argument(x) + ", " for x in a)
            return f"[{inner}]" if isinstance(a, list) else f"({inner})"
        if isinstance(a, dict):
            return "{" + ", ".join(f"{k!r}: {self._argument(v)}" for k, v in a.items()) + "}"
        if a is None or isinstance(a, (bool, int, str)):
            return repr(a)
        name = f"value_{len(self.globals)}"
        self.globals[name] = a
        return name

    def _view(self, v: View) -> str:
        """A Python tensor for a window on memory."""
        root = self.plan.find(v.buffer.name)
        shape, strides = self._tuple(v.shape), self._tuple(v.strides)
        if root in self.plan.offset:
            offset = self.plan.offset[root] + v.offset * v.buffer.dtype.itemsize
            return f"block.window({self._text(offset)}, {shape}, {strides}, {v.buffer.dtype})"
        name = self._tensor_name(v.buffer.name)
        owner = self.lowered.buffers.get(root, v.buffer)
        whole = v.offset == 0 and v.shape == owner.shape and v.strides == owner.strides
        if whole:
            return name
        return f"{name}.as_strided({shape}, {strides}, {name}.storage_offset() + {self._text(v.offset)})"

    def _output(self, o: Any) -> str:
        if isinstance(o, View):
            return self._view(o)
        if isinstance(o, tuple) and o and o[0] == "input":
            return f"arg{o[1]}"
        return self._argument(o)

    def _text(self, i: Index) -> str:
        return repr(i) if isinstance(i, ix.Poly) else str(i)

    def _tuple(self, xs: Sequence[Index]) -> str:
        return "(" + "".join(self._text(x) + ", " for x in xs) + ")"


def make_function(name: str, source: str, values: dict[str, Any]) -> Callable[[list[Any]], Any]:
    """The function `call` that the source defines, with `values` as its globals."""
    exec(compile(source, f"<dicp {name}>", "exec"), values)
    call: Any = values["call"]
    call._boxed_call = True
    return call  # type: ignore[no-any-return]


def _slots(n: int) -> tuple[Any, int]:
    array = (ctypes.c_int64 * n)()
    return array, ctypes.addressof(array)


def slice_bounds(n: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """(first position, length) of a slice of n elements."""
    places = range(*slice(start, end, step).indices(n))
    return places.start, len(places)


def _expect(t: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """t with the strides that the program was planned for."""
    if t.stride() == strides or t.dim() != len(shape):  # torch's fake unique_consecutive errs for a dim < 0
        return t
    if any(have != want and n > 1 for have, want, n in zip(t.stride(), strides, t.shape, strict=True)):
        for d, (want, n) in enumerate(zip(strides, t.shape, strict=True)):
            if want == 0 and n > 1:  # all its elements are one: those of a view of something expanded
                return _expect(t.narrow(d, 0, 1), (*shape[:d], 1, *shape[d + 1 :]), strides).expand(t.shape)
        fresh = torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device)
        return fresh.copy_(t)
    return t


def _returns_alias(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


__all__ = ["NativeSegment", "Program", "Runner", "Segment", "make_program", "touched"]
