"""A run of kernels and library calls as one C++ function.

    extern "C" int64_t segment0(const int64_t* a)      a: addresses of inputs, outputs, arena; sizes; result
    slots
        0       done
        k > 0   index check k - 1 failed
        k < 0   library call -k - 1 raised; of -k - UNFORESEEN, laid out its result as nobody foresaw
        NO_MEMORY   an input has none (runtime/failure.py)
Kernels live in units of their own; `bind` gives the segment their addresses once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dicp.ir.index import Index
from dicp.runtime.failure import NO_MEMORY, UNFORESEEN
from dicp.schedule.defs import Buffer, Call, View, operands, views
from dicp.schedule.kernels import Item, Launch
from dicp.vendor.asking import emit
from dicp.vendor.cpu_graph import codegen
from dicp.vendor.cpu_graph.build import Unit
from dicp.vendor.cpu_graph.expression import STORAGE, index_text
from dicp.vendor.cpu_graph.toolchain import Effort

EXPORT = 'extern "C" __attribute__((visibility("default"))) '
DTYPE_CODES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex32: 8,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.uint16: 27,
    torch.uint32: 28,
    torch.uint64: 29,
}
UNCOMPUTED = {  # dtypes that calls take and kernels do not
    torch.complex32: "complex32",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.uint16: "uint16_t",
    torch.uint32: "uint32_t",
    torch.uint64: "uint64_t",
}


def _moved(buffers: Sequence[Buffer]) -> int:
    """Bytes of distinct buffers, as far as their sizes are numbers."""
    return sum(b.nbytes for b in {b.name: b for b in buffers}.values() if isinstance(b.nbytes, int))


class SegmentWriter:
    """Writes one segment. What it offers to claims stands under "what claims use".

    late: results whose sizes the caller finds out, and lays out then."""

    def __init__(
        self,
        name: str,
        plan: Any,
        kernel_names: dict[str, str],
        size_names: Sequence[str],
        timed: bool = False,
        late: Sequence[str] = (),
    ) -> None:
        self.timed = timed
        self.labels: list[tuple[str, int]] = []  # (what, bytes moved) of each timed step
        self.name, self.plan, self.kernel_names = name, plan, kernel_names
        self.size_names = list(size_names)
        self.lines: list[str] = []
        self.made: dict[int, str] = {}  # id of a View -> its Tensor, within one call
        self.arguments: list[str] = []  # buffers whose address the caller passes, in order
        self.declared: set[str] = set()
        self.given: list[str] = []  # pointers to inputs that have elements
        self.kernels: dict[str, str] = {}  # function of another unit -> its parameters, in order of first use
        self.templates: dict[str, Unit] = {}  # of these, the ones that claims brought
        self.calls: list[Call] = []  # by the number that a failed one returns
        self.kept: list[str] = []  # library results that outlive the segment, in slot order
        self.slots = 0  # words of the caller's for kept results, or for the operands of a failed call
        self.late = frozenset(late)
        self.handles: dict[str, str] = {}
        self.hoisted: list[str] = []
        self.steps: list[str] = []
        self.count = 0
        self.uses_arena = False
        self.uses_checks = False

    # -- what claims use -----------------------------------------------------------------------------------

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def text(self, i: Index) -> str:
        return index_text(i, lambda a: a.key)

    def ints(self, values: Sequence[Any]) -> tuple[str, int]:
        """(name of an int64 array, length)."""
        name = self.fresh("n")
        if values:
            self.lines.append(f"const int64_t {name}[] = {{{', '.join(self.text(v) for v in values)}}};")
        else:
            self.lines.append(f"const int64_t* const {name} = nullptr;")
        return name, len(values)

    def tensor(self, v: View) -> str:
        """A handle for a window on memory, or of a packed weight."""
        if v.buffer.kind == "packed":
            return f"(Handle){self._argument(v.buffer.name)}"
        return f"{self.tensor_object(v)}.h"

    def packed(self, v: View) -> str:
        """What the vendor's `pack` made of a weight, as an array of words."""
        return f"((const int64_t*){self._argument(v.buffer.name)})"

    def _argument(self, name: str) -> str:
        if name not in self.arguments:
            self.arguments.append(name)
        return f"a[{self.arguments.index(name)}]"

    def tensor_object(self, v: View) -> str:
        """A `dicp::Tensor` for a window on memory."""
        pointer = self.pointer(v.buffer)
        where = pointer if v.offset == 0 else f"{pointer} + {self.text(v.offset)}"
        sizes, n = self.ints(v.shape)
        strides, _ = self.ints(v.strides)
        name = self.made[id(v)] = self.fresh("t")
        self.lines.append(
            f"const Tensor {name} = view({where}, {n}, {sizes}, {strides}, {DTYPE_CODES[v.buffer.dtype]});"
        )
        return name

    def optional(self, v: View | None) -> str:
        """A pointer to a handle, or nullptr."""
        if v is None:
            return "nullptr"
        name = self.fresh("o")
        self.lines.append(f"Handle {name} = {self.tensor(v)};")
        return f"&{name}"

    def output(self, buffer: Buffer) -> str:
        """A handle on planned memory that the call writes."""
        return self.tensor(View(buffer, buffer.shape, buffer.strides))

    def call(
        self,
        call: Call,
        function: str,
        arguments: Sequence[str],
        extra: Sequence[str] = (),
        of_user: bool = False,
    ) -> None:
        """One library call. Results that the library allocates are appended to the arguments,
        then `extra`. of_user: what it refuses are the user's operands, and the error is to be eager's."""
        results = (
            [b for b in call.outputs if b is not None and b.kind == "library"] if not call.claim.out else []
        )
        names = []
        for b in call.outputs if not call.claim.out else ():
            if b is None:
                names.append("nullptr")
                continue
            handle = f"{b.name}_t"
            if b.name not in self.handles:  # a branch may have two calls that make it
                self.handles[b.name] = handle
                self.hoisted.append(f"Tensor {handle};")
            names.append(f"&{handle}.h")
        self.calls.append(call)
        number = len(self.calls)
        failed = self._failed(call, number) if of_user else f"return {-number};"
        self.lines.append(f"if ({function}({', '.join([*arguments, *names, *extra])})) {failed}")
        self._require(results, number)

    def is_over(self, call: Call) -> bool:
        """Whether the call's only result is to be written over an operand (`Claim.over`)."""
        out = call.outputs[0]
        assert out is not None
        return bool(self.plan.find(out.name) != out.name)

    def call_over(self, call: Call, function: str, arguments: Sequence[str]) -> None:
        """One library call that writes its result over an operand, on which it gives another handle."""
        self.calls.append(call)
        name = self.fresh("again")
        given = ", ".join([*arguments, f"&{name}.h"])
        self.lines += [f"Tensor {name};", f"if ({function}({given})) return {-len(self.calls)};"]

    def call_into(self, call: Call, function: str, arguments: Callable[[str], Sequence[str]]) -> None:
        """One call of a template, in place of a library's that allocates its only result. arguments(pointer
        of the result)."""
        b = call.outputs[0]
        assert b is not None
        sizes, n = self.ints(b.shape)
        strides, _ = self.ints(b.strides)
        given = ", ".join(arguments(f"{b.name}_t.data<{STORAGE[b.dtype]}>()"))
        self.calls.append(call)
        allocated = f"{b.name}_t.allocate({n}, {sizes}, {strides}, {DTYPE_CODES[b.dtype]})"
        self.lines.append(f"if (!{allocated} || {function}({given})) return {-len(self.calls)};")

    def branch(self, condition: str, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """Two ways to make a call's results, of which `condition` picks one when it runs. Each adds lines."""
        before, ways = self.lines, []
        for way in (then, otherwise):
            self.lines = []
            way()
            ways.append(["  " + line for line in self.lines])
        self.lines = [*before, f"if ({condition}) {{", *ways[0], "} else {", *ways[1], "}"]

    def dispatch(
        self, call: Call, op: str, overload: str, words: Sequence[str], copy: bool, lists: bool
    ) -> None:
        """A call through torch's dispatcher. words: an expression per argument of the op's schema. copy: the
        results are views, of which the program keeps copies. lists: the op returns one list of tensors."""
        outs = []
        for b in call.outputs:
            if b is not None:
                self.handles[b.name] = f"{b.name}_t"
                self.hoisted.append(f"Tensor {b.name}_t;")
            outs.append("nullptr" if b is None else f"&{b.name}_t")
        self.calls.append(call)
        number = len(self.calls)
        stack, room = self.fresh("stack"), max(len(words), len(outs), 1)
        self.lines.append(f"Word {stack}[{room}] = {{{', '.join(words) or '0'}}};")
        failed = self._failed(call, number)
        self.lines.append(f'if (torch_call_dispatcher("{op}", "{overload}", {stack}, OLDEST)) {failed}')
        if lists:
            into = self.fresh("into")
            self.lines.append(f"Tensor* const {into}[] = {{{', '.join(outs)}}};")
            self.lines.append(f"take_list({stack}[0], {into}, {len(outs)}, {str(copy).lower()});")
        elif call.node.target._schema.returns:
            self.lines += [f"take({stack}[{k}], {o}, {str(copy).lower()});" for k, o in enumerate(outs)]
        self._require([b for b in call.outputs if b is not None and b.name not in self.late], number)

    def _failed(self, call: Call, number: int) -> str:
        """The statement that hands the operands of a call that raised to the caller, who raises it again: 1,
        then handles and numbers, then what owns memory that this function would free."""
        given = operands((call.args, call.kwargs))
        values = [
            f"word({self.made.get(id(v)) or self.tensor_object(v)})"
            if isinstance(v, View)
            else f"word((int64_t)({self.text(v)}))"
            for v in given
        ]
        roots = dict.fromkeys(self.plan.find(v.buffer.name) for v in given if isinstance(v, View))
        values += [f"word({self.handles[root]})" for root in roots if root in self.handles]
        self.slots = max(self.slots, 1 + len(values))
        return f"return failed(results, {-number}, {{{', '.join(['1', *values])}}});"

    def _require(self, results: Sequence[Buffer], number: int) -> None:
        """Lay results out as they were planned, if somebody reads them."""
        for b in results:
            if self.plan.find(b.name) in self.plan.unread:
                continue
            sizes, n = self.ints(b.shape)
            strides, _ = self.ints(b.strides)
            laid_out = f"{b.name}_t.require({n}, {sizes}, {strides}, {DTYPE_CODES[b.dtype]})"
            self.lines.append(f"if (!{laid_out}) return {-number - UNFORESEEN};")

    def template(self, function: str, parameters: str, source: str, effort: Effort = "full") -> str:
        """A function of the vendor's own that `call` may name; source: its unit, which exports it."""
        self.kernels[function] = parameters
        self.templates[function] = Unit(function, source, effort=effort)
        return function

    @property
    def argument_count(self) -> int:
        """Integers that the function takes."""
        return len(self.arguments) + self.uses_arena + bool(self.slots) + len(self.size_names)

    # -- pointers ------------------------------------------------------------------------------------------

    def pointer_to(self, v: View | None) -> str:
        """The C++ pointer of a window's first element, or nullptr."""
        if v is None:
            return "nullptr"
        if v.buffer.kind == "packed":
            return f"((const {STORAGE[v.buffer.dtype]}*){self._argument(v.buffer.name)})"
        start = self.pointer(v.buffer)
        return start if v.offset == 0 else f"{start} + {self.text(v.offset)}"

    def pointer(self, b: Buffer) -> str:
        """The C++ pointer of a buffer, declared at its first use."""
        mine = (
            b.name if b.kind not in ("input", "constant") else f"in_{b.name}"
        )  # a user's name may be a C++ word
        if b.name in self.declared:
            return mine
        self.declared.add(b.name)
        kind = STORAGE.get(b.dtype) or UNCOMPUTED.get(b.dtype, "char")
        root = self.plan.find(b.name)
        if root in self.plan.offset:
            self.uses_arena = True
            source = f"arena + {self.text(self.plan.offset[root])}"
        elif root in self.plan.borrowed:
            lender, offset = self.plan.borrowed[root]
            source = f"{self._argument(lender)} + {self.text(offset)}"
        elif root in self.handles:
            source = f"{self.handles[root]}.data<char>()"
        else:
            source = self._argument(root)
        if b.kind == "input" and b.numel != 0:
            known = isinstance(b.numel, int)
            self.given.append(mine if known else f"({mine} || !({self.text(b.numel)}))")
        self.hoist(f"{kind}* const {mine} = ({kind}*)({source});", root in self.handles)
        return mine

    def hoist(self, line: str, here: bool) -> None:
        """Declare at the top of the function, or in place when the value only exists from here on."""
        (self.steps if here else self.hoisted).append(line)

    # -- steps ---------------------------------------------------------------------------------------------

    def write(self, item: Item) -> None:
        """Add a step."""
        if isinstance(item, Launch):
            self._launch(item)
        else:
            self._library(item)

    def free(self, roots: Sequence[str]) -> None:
        """Drop results of libraries."""
        self.steps += [f"{self.handles[root]}.reset();" for root in roots]

    def _launch(self, launch: Launch) -> None:
        function = self.kernel_names[launch.kernel.digest]
        if function not in self.kernels:
            kernel = codegen.canonical_with_notes(launch.kernel)
            self.kernels[function] = codegen.signature(kernel, "").removeprefix("void (").removesuffix(")")
        args = [self.pointer(b) for b in launch.buffers] + [v.name for v in launch.kernel.sizes]
        if codegen.has_checks(launch.kernel):
            self.uses_checks = True
            args.append(f"checks + {launch.first_check}")
        line = f"  // {launch.kernel.origins[0]}" if launch.kernel.origins else ""
        self._timed(f"{function}", _moved(launch.buffers), [f"{function}({', '.join(args)});{line}"])

    def _library(self, call: Call) -> None:
        self.lines, self.made = [], {}
        emit(self, call)
        note = f"  // {call.note}"
        moved = _moved(
            [v.buffer for v in views((call.args, call.kwargs))] + [b for b in call.outputs if b is not None]
        )
        self._timed(call.note, moved, [f"{{{note}", *("  " + line for line in self.lines), "}"])

    def _timed(self, label: str, moved: int, lines: list[str]) -> None:
        if not self.timed:
            self.steps += lines
            return
        self.labels.append((label, moved))
        self.steps += ["clock = now_ns();", *lines, f"times[{len(self.labels) - 1}] += now_ns() - clock;"]

    def keep(self, names: Sequence[str]) -> None:
        """Hand library results to the caller through the result slots, unless a check failed."""
        self.kept += names
        self.slots = max(self.slots, len(self.kept))

    def check(self, n_checks: int) -> list[str]:
        if not self.uses_checks:
            return []
        return [f"for (int k = 0; k < {n_checks}; ++k)", "  if (checks[k]) return k + 1;"]

    def source(self, n_checks: int) -> str:
        """The function and what it needs, in a namespace of its own."""
        out = [f"namespace of_{self.name} {{", ""]
        for k, (name, parameters) in enumerate(self.kernels.items()):
            result = "int32_t" if name in self.templates else "void"
            out.append(f"static {result} (*{name})({parameters});  // kernel {k}")
        if self.timed:
            out += [
                "",
                f"static int64_t times[{len(self.labels) + 1}];",
                f"{EXPORT}const int64_t* {self.name}_times() "
                "{ return times; }",
            ]
        bound = [f"  {n} = (decltype({n}))k[{i}];" for i, n in enumerate(self.kernels)]
        out += [
            "",
            f"{EXPORT}int64_t {self.name}_bind(const int64_t* k) {{",
            *(bound or ["  (void)k;"]),
            "  return 0;",
            "}",
            "",
        ]
        body = []
        position = len(self.arguments)
        if self.uses_arena:
            body.append(f"char* const arena = (char*)a[{position}];")
            position += 1
        if self.slots:
            body.append(f"int64_t* const results = (int64_t*)a[{position}];")
            position += 1
        for name in self.size_names:
            body.append(f"const int64_t {name} = a[{position}];")
            position += 1
        if self.timed:
            body.append("int64_t clock = 0;")
        if self.uses_checks:
            body.append(f"int32_t checks[{n_checks}] = {{}};")
        there = f"if (!({' && '.join(self.given)})) return {NO_MEMORY};  // of a fake tensor, say"
        body += [*self.hoisted, *([there] if self.given else [])]
        kept = [
            f"results[{k}] = (int64_t){self.handles[name]}.release();" for k, name in enumerate(self.kept)
        ]
        body += [*self.steps, *self.check(n_checks), *kept, "return 0;"]
        out += [
            f"{EXPORT}int64_t {self.name}(const int64_t* a) {{",
            *("  " + line for line in body),
            "}",
            f"}}  // namespace of_{self.name}",
        ]
        return "\n".join(out)


def unit_source(writers: Sequence[SegmentWriter], n_checks: int) -> str:
    """The translation unit of a program's segments."""
    head = ['#include "dicp_shim.h"', '#include "dicp_storage.h"', "using namespace dicp;", ""]
    return "\n".join([*head, "\n\n".join(w.source(n_checks) for w in writers), ""])
