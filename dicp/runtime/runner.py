"""The Python function that runs a program.

    alloc     outputs and the largest temporaries (torch's memory or the pool's), an arena for the others
    native    a run of kernels and library calls, one call into generated code
    extern    an aten call made from Python
    free      library results after their last use
    return
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import empty_strided_cpu, tensors_from_handles
from dicp.ir import index as ix
from dicp.ir.index import Index, Var
from dicp.ir.printer import user_location
from dicp.ops.aliases import places_in_memory, returns_alias
from dicp.runtime import support
from dicp.runtime.arena import ARENA
from dicp.runtime.failure import broken_claim
from dicp.runtime.function import FIRST_GLOBALS, FIRST_LINE, make_function
from dicp.runtime.host_numbers import host_number
from dicp.runtime.malloc import keep_more
from dicp.runtime.marked_tensors import plain
from dicp.runtime.pool import LARGE, PIECE, POOL
from dicp.runtime.program import Program, Segment
from dicp.runtime.sizes import Sizes, spelled
from dicp.schedule.defs import Buffer, Call, Host, Raw, View, leaves, views
from dicp.schedule.memory import touched
from dicp.vendor.asking import claim_error, emit


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
        self.names: dict[str, str] = {}  # buffer root -> Python tensor name
        outputs = [o for k, o in enumerate(self.lowered.outputs) if k not in self.lowered.free]
        self.shown = {self.plan.find(v.buffer.name) for v in views(outputs)}  # what the caller sees
        self.given: dict[str, str] = {}  # the same of inputs that the caller is to find changed or returned
        self.globals: dict[str, Any] = {
            "empty_strided": empty_strided_cpu,
            "ARENA": ARENA,
            "POOL": POOL,
            "keep_more": keep_more,
            "slots": support.slots,
            "steal": tensors_from_handles,
            "expect": support.expect,
            "promised": support.promised,
            "fill": support.fill,
            "written": support.written,
            "bounds": support.slice_bounds,
            "per_size": support.per_size,
            "plain": plain,
            "within": support.within,
            "apart": support.apart,
            "parts": support.parts,
            "torch": torch,
            **FIRST_GLOBALS,
        }
        self.lines: list[str] = []
        self.sizes = Sizes(program, self._saved(), self.lines, self.globals)
        self.claim_lines: list[tuple[range, Call]] = []
        self.layout: list[str] = []  # the function `arena`, where sizes leave offsets open

    def function(self) -> Callable[[list[Any]], Any]:
        """Raises VendorError where a claim wrote a line that is no Python, SyntaxError where another did."""
        self.source = self._write()
        try:
            return make_function(self.program.name, self.source, self.globals)
        except SyntaxError as e:
            call = self._claim_of(e.lineno or 0)
            if call is None:
                raise
            raise claim_error(call, e.msg) from None

    def _claim_of(self, line: int) -> Call | None:
        """The call whose claim wrote a line of the source."""
        end = self.source.splitlines().index("def call(args):") + 2
        for k, text in enumerate(self.lines):
            end += 1 + text.count("\n")
            if line < end:
                return next((call for lines, call in self.claim_lines if k in lines), None)
        return None

    # -- writing -------------------------------------------------------------------------------------------

    def _write(self) -> str:
        self.lines.append(FIRST_LINE)
        self._inputs()
        self._lay_out()
        self._keep_what_is_dropped()
        self._take_arena()
        for name, constant in self.lowered.constants.items():
            self.names[name] = name
            self.globals[name] = constant
        last_step = self._last_steps()
        for k, step in enumerate(self.program.steps):
            if isinstance(step, Segment):
                for item in step.items:
                    for buffer in touched(item)[1]:
                        self._need(buffer)
                self._temporaries(step)
                self._native(step)
            elif step.host:
                self._host_step(step)
            else:
                self.extern(step)
            self._release([n for n, last in last_step.items() if last == k])
        self._give_arena()
        self._write_back()
        self.lines.append(f"return ({''.join(self._output(o) + ', ' for o in self.lowered.outputs)})")
        body = ["def call(args):", *("    " + line for line in self.lines)]
        return "\n".join([*(["@per_size", *self.layout, "", ""] if self.layout else []), *body, ""])

    def _last_steps(self) -> dict[str, int]:
        """The step after which nobody needs a tensor that Python holds: library results, spilled temporaries,
        externs, owned inputs, and what is allocated like a result and is none (`_release` knows those that
        are)."""
        kinds, owned = ("library", "extern", "output"), self.program.owned
        steps = len(self.program.steps)
        return {
            name: self.program.where[item]
            for name, item in self.plan.last_use.items()
            if (self.lowered.buffers[name].kind in kinds or name in self.plan.spilled or name in owned)
            and self.program.where.get(item, steps) < steps - 1
        }

    def _release(self, roots: Sequence[str]) -> None:
        returned = {self.names.get(self.plan.find(v.buffer.name)) for v in views(self.lowered.outputs)}
        returned |= {f"arg{o[1]}" for o in self.lowered.outputs if isinstance(o, tuple)}
        returned |= {self.names[n] for n in self.given}
        dead = [self.names[n] for n in roots if n in self.names and self.names[n] not in returned]
        if dead:
            self.lines.append(f"del {', '.join(dead)}")

    def _lay_out(self) -> None:
        """Where symbolic sizes leave open what is largest, a function of the sizes that tells the arena's
        size and the offsets in it. It is called here."""
        maxima, size = self.plan.maxima, self.plan.size
        if not maxima:
            return
        names = [symbol.name for symbol in maxima]
        given = {a.name for n in (size, *sum(maxima.values(), ())) for a in ix.atoms(n) if isinstance(a, Var)}
        sizes = ", ".join(sorted(given - set(names)))
        self.layout = [f"def arena({sizes}):"]
        for symbol, numbers in maxima.items():
            self.layout.append(f"    {symbol.name} = max({', '.join(self._text(n) for n in numbers)})")
        self.layout.append(f"    return {', '.join([self._text(size), *names])}")
        self.lines.append(f"arena_bytes, {', '.join(names)} = arena({sizes})")
        self.sizes.bound |= set(names)

    def _keep_what_is_dropped(self) -> None:
        """In malloc, which else returns to the system what a forward saves as the backward drops it, and what
        libraries allocate within each call."""
        saved = {"output": PIECE} if self.program.results == "saved" else {}
        least = {"library": LARGE, "extern": LARGE, **saved}
        buffers = [b for b in self.lowered.buffers.values() if b.kind in least]
        if self.program.results != "new" and any(self._is_large(b, least[b.kind]) for b in buffers):
            self.lines.append("keep_more()")

    def _is_large(self, b: Buffer, nbytes: int) -> bool:
        """At the sizes of the example; not where those are known only while the program runs."""
        symbols = self.lowered.symbols
        return not symbols.late(b.nbytes) and symbols.hint(b.nbytes) >= nbytes

    def _take_arena(self) -> None:
        if self.plan.offset:
            self.lines.append(f"block = ARENA.take({self._arena_bytes()})")

    def _arena_bytes(self) -> str:
        return "arena_bytes" if self.plan.maxima else self._text(self.plan.size)

    def _give_arena(self) -> None:
        if self.plan.offset:
            self.lines.append("ARENA.give(block)")

    def _need(self, buffer: Buffer) -> None:
        """Torch memory for a result that has none yet, or for the one whose memory a temporary lies in; its
        sizes are known by now."""
        root = self.plan.find(buffer.name)
        root, _ = self.plan.borrowed.get(root, (root, 0))
        owner = self.lowered.buffers[root]
        if owner.kind == "output" and root not in self.names:
            self.names[root] = root
            self._allocate(root, owner)

    def _temporaries(self, segment: Segment) -> None:
        """Memory for what has its own while the program runs."""
        for root in (root for roots in segment.allocs.values() for root in roots):
            self.names[root] = root
            self._allocate(root, self.lowered.buffers[root])

    def _allocate(self, name: str, buffer: Buffer) -> None:
        unseen = name in self.plan.spilled or self.program.results == "saved" and name not in self.shown
        pooled = self.program.results != "new" and self._is_large(buffer, PIECE if unseen else LARGE)
        make = "POOL.empty(call, " if pooled else "empty_strided("
        shape, strides = self._tuple(buffer.shape), self._tuple(buffer.strides)
        self.lines.append(f"{name} = {make}{shape}, {strides}, {buffer.dtype})")

    def _inputs(self) -> None:
        names = [f"arg{k}" for k in range(len(self.lowered.inputs))]
        if names:
            self.lines.append(f"{', '.join(names)}, = args")
        self.lines.append("args.clear()")
        for arg, bound in zip(names, self.lowered.inputs, strict=True):
            if isinstance(bound, Buffer):
                self.names[bound.name] = arg
            elif isinstance(bound, Raw):
                self.names[bound.name] = arg
            elif isinstance(bound, ix.Poly):
                self.sizes.offer(bound, arg)
        self._read_bits()
        sizes: list[tuple[Index, str]] = []
        strides: list[tuple[Index, str]] = []  # last: of dims of one element they may be any
        for arg, bound in zip(names, self.lowered.inputs, strict=True):
            if isinstance(bound, Buffer):
                sizes += [(n, f"{arg}.size({d})") for d, n in enumerate(bound.shape)]
                strides += [(n, f"{arg}.stride({d})") for d, n in enumerate(bound.strides)]
        given = [*sizes, *strides]
        for n, source in given:
            self.sizes.offer(n, source)
        numbers = [(b, a) for a, b in zip(names, self.lowered.inputs, strict=True) if isinstance(b, ix.Poly)]
        self.sizes.solve([*numbers, *given])
        self.sizes.compute()
        self._as_planned()

    def _as_planned(self) -> None:
        """What autograd kept for a backward lies as planned, unless a hook of the user's packed it otherwise
        (torch.autograd.graph.saved_tensors_hooks)."""
        saved = self._saved()
        if not saved:
            return
        names = [self.names[b.name] for b in saved]
        planned = [f"({self._tuple(b.shape)}, {self._tuple(b.strides)})" for b in saved]
        here = "".join(f"{n}.stride(), " for n in names)
        self.lines.append(f"if ({here}) != ({''.join(self._tuple(b.strides) + ', ' for b in saved)}):")
        again = (f"expect({n}, *{p}), " for n, p in zip(names, planned, strict=True))
        self.lines.append(f"    {', '.join(names)}, = {''.join(again)}")

    def _saved(self) -> list[Buffer]:
        inputs = (b for b in self.lowered.inputs if isinstance(b, Buffer))
        return [b for b in inputs if b.shape and b.name in self.program.saved]

    def _read_bits(self) -> None:
        """Inputs that may be conjugated or negated, as tensors that are not."""
        returned = {v.buffer.name for v in views(self.lowered.outputs)}
        positions = {o[1] for o in self.lowered.outputs if isinstance(o, tuple) and o and o[0] == "input"}
        for k, bound in enumerate(self.lowered.inputs):
            if not isinstance(bound, Buffer) or bound.name not in self.lowered.marked:
                continue
            arg = self.names[bound.name]
            if bound.name in returned | self.lowered.mutated or k in positions:
                self.given[bound.name] = arg
                self.names[bound.name] = f"plain{k}"
            self.lines.append(f"{self.names[bound.name]} = plain({arg})")

    def _write_back(self) -> None:
        """What was written goes to the caller's own inputs, and results are views of those."""
        for name, arg in self.given.items():
            if name in self.lowered.mutated:
                self.lines.append(f"if {self.names[name]} is not {arg}: {arg}.copy_({self.names[name]})")
        self.names |= self.given

    def _native(self, segment: Segment) -> None:
        native = self.natives[segment.number]
        n = segment.number
        args = [f"{self._tensor_name(a)}.data_ptr()" for a in native.arguments]
        if native.arena:
            args.append("block.address")
        if native.slots:
            self.lines.append(f"kept{n} = slots({native.slots})")
            args.append(f"kept{n}[1]")
        args += self.sizes.arguments(segment)
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
            self.sizes.bind(n, f"{b.name}.size({d})")
        self.sizes.compute()
        self.lines.append(f"{b.name} = expect({b.name}, {self._tuple(b.shape)}, {self._tuple(b.strides)})")

    def _tensor_name(self, name: str) -> str:
        return self.names[self.plan.find(name)] if self.plan.find(name) in self.names else self.names[name]

    def _host_step(self, call: Call) -> None:
        """A number read from a tensor, where a view lies, or a condition that must hold."""
        args = [self.value(a) for a in call.args]
        where = user_location(call.node)
        comment = f"    # {where}" if where else ""
        if call.node.target is torch.ops.aten._assert_scalar.default:
            self.lines.append(f"if not {args[0]}: raise RuntimeError({args[1]}){comment}")
            return
        if call.node.target is torch.ops.aten.slice.Tensor:
            n, start, end, step, offset, stride = args
            self.lines.append(f"begin, length = bounds({n}, {start}, {end}, {step}){comment}")
            sources: tuple[str, ...] = ("length", "begin", f"{offset} + begin * {stride}")
        elif call.node.target is torch.ops.aten.select.int:
            n, at, offset, stride = args
            sources = (f"{offset} + ({at} + {n} if {at} < 0 else {at}) * {stride}",)
        else:
            truth = isinstance(call.node.meta["val"], torch.SymBool)
            sources = (f"int({args[0]}.item())" if truth else f"{args[0]}.item()",)
        for number, source in zip(call.results, sources, strict=True):
            if isinstance(number, ix.Poly):
                self.sizes.bind(number, source)
        self.sizes.compute()

    def extern(self, call: Call, function: Callable[..., Any] | None = None) -> None:
        """function: what is called in the op's stead."""
        target = f"op_{len(self.globals)}"
        function = call.node.target if function is None else function
        if places_in_memory(call.node):
            function = functools.partial(support.placed, function)
        self.globals[target] = function
        args = [self.value(a) for a in call.args] + [
            f"{k}={self.value(v)}" for k, v in call.kwargs.items()
        ]
        where = user_location(call.node)
        comment = f"    # {where}" if where else ""
        self.lines.append(f"result = {target}({', '.join(args)}){comment}")
        copies = returns_alias(call.node.target)
        picked = _picked(call.node)
        given = leaves(call.node.meta.get("val")) if call.results else []  # a write has none
        for (path, val), b in zip(given, call.results, strict=True):
            source = "result" + "".join(f"[{k}]" for k in path)
            if isinstance(b, Buffer) and path not in picked:
                self.names[b.name] = b.name  # may be None: cuDNN's attention gives no sums without gradient
                self.lines.append(f"{b.name} = {source}")
            elif isinstance(b, Buffer):
                if val.is_conj() or val.is_neg():
                    source = f"plain({source})"
                self.names[b.name] = b.name
                # a view of arena memory would change under the reader's feet
                self.lines.append(f"{b.name} = {source}.clone()" if copies else f"{b.name} = {source}")
                self._measure(b)
            elif isinstance(b, Raw):
                self.names[b.name] = b.name
                self.lines.append(f"{b.name} = {source}")
            elif isinstance(b, ix.Poly):
                self.sizes.bind(b, source)

    # -- what claims write with, in vendors whose segments are lines of this function ------------------------

    def claimed(self, call: Call) -> None:
        """A library call, as its claim writes it. VendorError where that fails, writes nothing, or leaves a
        result that the library allocates without `keep`."""
        watched = self._watched(call) if self.program.verify else []
        self.lines += [f"fill({t})" for t in watched]
        before = len(self.lines)
        emit(self, call)
        if len(self.lines) == before and any(b is not None and 0 not in b.shape for b in call.outputs):
            raise claim_error(call, "it writes no line")
        self.claim_lines.append((range(before, len(self.lines)), call))
        if watched:
            claim = self._claim(call)
            self.lines += [f"written({t}, {claim})" for t in watched]
        made = (b for b in call.outputs if b is not None and b.kind == "library")
        lost = [b.name for b in made if self.plan.find(b.name) == b.name and b.name not in self.names]
        if lost:
            raise claim_error(call, f"nothing keeps {', '.join(lost)}, which the library allocates (`keep`)")

    def _watched(self, call: Call) -> list[str]:
        """The results that a call with `out` writes, as tensors; not what it updates."""
        if not call.claim.out or call.claim.updates or call.claim.over is not None:
            return []
        return [self.into(b) for b in call.results if isinstance(b, Buffer)]

    def _claim(self, call: Call) -> str:
        """What says whose a call is, as a global of the function."""
        name = f"claim_{len(self.globals)}"
        about = (call.claim.name, str(call.node.target), user_location(call.node) or "")
        self.globals[name] = functools.partial(broken_claim, *about)
        return name

    def line(self, text: str, note: str = "") -> None:
        """A statement of the function, with a comment."""
        self.lines.append(text + (f"  # {note}" if note else ""))

    def into(self, buffer: Buffer) -> str:
        """Planned memory that a call with `out` writes, as a tensor."""
        return self.view(View(buffer, buffer.shape, buffer.strides))

    def keep(self, call: Call, source: str) -> None:
        """Take over the results that a library allocated: `source` is a tensor, or a tuple of them. Those of
        another dtype or size than was traced are a VendorError when the program runs."""
        many = isinstance(call.node.meta.get("val"), (tuple, list))
        claim = self._claim(call)
        for k, b in enumerate(call.results):
            if isinstance(b, Buffer):
                self.names[b.name] = b.name
                item = f"{source}[{k}]" if many else source
                planned = f"{self._tuple(b.shape)}, {self._tuple(b.strides)}, {b.dtype}"
                self.lines.append(f"{b.name} = promised({item}, {planned}, {claim})")

    def value(self, a: Any) -> str:
        """Any argument of a call."""
        if isinstance(a, View):
            return self.view(a)
        if isinstance(a, Raw):
            return self.names[a.name]
        if isinstance(a, Host):
            return host_number(a.expr, self.globals, f"host_{len(self.globals)}")
        if isinstance(a, ix.Poly):
            return self._text(a)
        if isinstance(a, (list, tuple)):
            inner = "".join(self.value(x) + ", " for x in a)
            return f"[{inner}]" if isinstance(a, list) else f"({inner})"
        if isinstance(a, dict):
            return "{" + ", ".join(f"{k!r}: {self.value(v)}" for k, v in a.items()) + "}"
        if a is None or isinstance(a, (bool, int, str)):
            return repr(a)
        name = f"value_{len(self.globals)}"
        self.globals[name] = a
        return name

    def view(self, v: View | None, apart: bool = False) -> str:
        """A Python tensor for a window on memory; `apart`: no view of another tensor, but for its marks."""
        if v is None:
            return "None"
        window = self._window(v)
        if apart and ".as_strided(" in window:
            window += ".detach()"
        elif apart and self.lowered.buffers[self.plan.find(v.buffer.name)].kind in ("library", "extern"):
            window = f"apart({window})"
        return window + ".conj()" * v.conj + "._neg_view()" * v.neg

    def _window(self, v: View) -> str:
        root = self.plan.find(v.buffer.name)
        shape, strides = self._tuple(v.shape), self._tuple(v.strides)
        if root in self.plan.offset:
            offset = self.plan.offset[root] + v.offset * v.buffer.dtype.itemsize
            return f"block.window({self._text(offset)}, {shape}, {strides}, {v.buffer.dtype})"
        if root in self.plan.borrowed:
            return self._within(v)
        name = self._tensor_name(v.buffer.name)
        owner, seen_as = self._owner(v), self._seen_as(v)
        if owner.kind == "input" and owner.dtype.is_complex and seen_as == owner.dtype.to_real():
            name = f"parts({name})"
        elif seen_as is not None:
            first = f"{name}.storage_offset() * {owner.dtype.itemsize} // {seen_as.itemsize}"
            return f"within({name}, {first} + {self._text(v.offset)}, {shape}, {strides}, {seen_as})"
        whole = v.offset == 0 and v.shape == owner.shape and v.strides == owner.strides
        if whole and seen_as is None:
            return name
        return f"{name}.as_strided({shape}, {strides}, {name}.storage_offset() + {self._text(v.offset)})"

    def _owner(self, v: View) -> Buffer:
        """The buffer whose memory the view's lies in."""
        return self.lowered.buffers.get(self.plan.find(v.buffer.name), v.buffer)

    def _seen_as(self, v: View) -> torch.dtype | None:
        """The dtype as which memory is read, where the owner's is another: parts of complex numbers, say."""
        return v.seen_as or (v.buffer.dtype if v.buffer.dtype != self._owner(v).dtype else None)

    def _within(self, v: View) -> str:
        """A window on a temporary that lies in a result's memory."""
        lender, at = self.plan.borrowed[self.plan.find(v.buffer.name)]
        size = v.buffer.dtype.itemsize
        offset = ix.floordiv(at, size) + v.offset
        shape, strides = self._tuple(v.shape), self._tuple(v.strides)
        return f"within({self.names[lender]}, {self._text(offset)}, {shape}, {strides}, {v.buffer.dtype})"

    def _output(self, o: Any) -> str:
        if isinstance(o, View):
            # Not as a view of what only this program knows: AOTAutograd would make it again from an input,
            # which a call may have viewed as another dtype, and autograd would forbid writes to it. A mark is
            # made again only of a view that has one.
            made = self.lowered.buffers[self.plan.find(o.buffer.name)].kind != "input"
            return self.view(o, apart=made)
        if isinstance(o, tuple) and o and o[0] == "input":
            return f"arg{o[1]}"
        return self.value(o)

    def _text(self, i: Index) -> str:
        return spelled(i)

    def _tuple(self, xs: Sequence[Index]) -> str:
        return "(" + "".join(self._text(x) + ", " for x in xs) + ")"


def _picked(node: fx.Node, path: tuple[int, ...] = ()) -> set[tuple[int, ...]]:
    """Which of the things that a call returns somebody takes, by the indices that lead there."""
    users = [u for u in node.users if u.target is operator.getitem]
    below = (_picked(u, (*path, u.args[1])) for u in users)  # type: ignore[arg-type]
    return {path}.union(*below)


__all__ = ["NativeSegment", "Runner"]
