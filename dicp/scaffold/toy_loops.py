"""toy_loops: a kernel vendor in one file. Its "chip" is this machine's CPU, its kernel language
plain C: a kernel becomes a scalar loop nest, built by the C compiler and called through ctypes."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

import dicp
from dicp.errors import BuildError, VendorError, check_error
from dicp.ir import index as ix
from dicp.ir.dependence import Dependence
from dicp.ir.expr import CHECKS, Expr, children
from dicp.ir.index import Index
from dicp.ir.kernel import Axis, Kernel, Reduce, Scan, Statement, Store, canonical, identity
from dicp.ir.phases import is_full, phases
from dicp.runtime.program import Program, Segment
from dicp.runtime.runner import Runner
from dicp.schedule.defs import Buffer, Call, View
from dicp.schedule.kernels import Launch
from dicp.vendor.asking import emitted
from dicp.vendor.base import Claim, Machine

aten = torch.ops.aten

# How this vendor spells the scalar primitives. Operands are names and literals, so none needs parentheses;
# tgmath.h picks expf for a float. Of what C lacks (digamma, erfinv, gcd, lcm) there is no word.
CALLS = """sqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh
asinh acosh atanh erf erfc lgamma floor ceil trunc isinf signbit"""
WORDS: dict[str, str] = {op: f"{op}({{0}})" for op in CALLS.split()}
WORDS |= {op: f"{op}({{0}}, {{1}})" for op in "fmod pow atan2 hypot copysign nextafter fmin fmax".split()}
WORDS |= {
    op: f"{{0}} {sign} {{1}}"
    for ops, signs in (
        ("add sub mul div band bor bxor", "+ - * / & | ^"),
        ("lt le gt ge eq ne land lor lxor", "< <= > >= == != && || !="),
    )
    for op, sign in zip(ops.split(), signs.split())
}
WORDS |= {"neg": "-{0}", "abs": "fabs({0})", "sign": "({0} > 0) - ({0} < 0)", "reciprocal": "1 / {0}"}
WORDS |= {"rsqrt": "1 / sqrt({0})", "sigmoid": "1 / (1 + exp(-{0}))", "round_even": "rint({0})"}
WORDS |= {"isnan": "{0} != {0}", "lnot": "!{0}", "bnot": "~{0}", "fma": "{0} * {1} + {2}"}
WORDS |= {"where": "{0} ? {1} : {2}", "div_trunc": "trunc({0} / {1})"}
WORDS |= {"div_floor": "floor_divide({0}, {1})", "remainder": "floor_remainder({0}, {1})"}
WORDS["maximum"] = "{0} != {0} || {0} > {1} ? {0} : {1}"  # NaN wins
WORDS["minimum"] = "{0} != {0} || {0} < {1} ? {0} : {1}"
WORDS |= {
    "shl": "{1} < 0 || {1} >= {bits} ? 0 : (uint64_t){0} << {1}",
    "shr": "(int64_t){0} >> ({1} < 0 || {1} >= {bits} ? 63 : {1})",
}
# The words of integers, where they are others: through an int64, which the result's type then wraps.
INTEGERS = {
    "abs": "{0} < 0 ? -{0} : {0}",
    "div_trunc": "quotient({0}, {1})",
    "div_floor": "floor_quotient({0}, {1})",
    "remainder": "floor_rest({0}, {1})",
    "fmod": "rest({0}, {1})",
    "pow": "power({0}, {1})",
    "fmax": WORDS["maximum"],
    "fmin": WORDS["minimum"],
    "signbit": "{0} < 0",
    "isinf": "false",
} | dict.fromkeys(("floor", "ceil", "trunc", "round_even"), "{0}")

# How a value joins what an accumulator, or memory, holds.
FOLDS = {
    **{"sum": WORDS["add"], "prod": WORDS["mul"], "max": WORDS["maximum"], "min": WORDS["minimum"]},
    **{"any": WORDS["lor"], "all": WORDS["land"], "logsumexp": "log_add_exp({0}, {1})"},
}
UPDATES = {"add": "sum", "mul": "prod", "max": "max", "min": "min"}
REDUCTIONS = frozenset(FOLDS) | {"argmax", "argmin", "welford"}

TYPES = {torch.bool: "bool", torch.float32: "float", torch.float64: "double"}
TYPES |= {getattr(torch, t): f"{t}_t" for t in ("uint8", "int8", "int16", "int32", "int64")}
STORAGE = TYPES | {torch.bfloat16: "bfloat16", torch.float16: "float16"}

FLAGS = "-O2 -shared -fPIC -fwrapv -fno-strict-aliasing -ffp-contract=off".split()
RUNTIME = """\
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <tgmath.h>

static inline int64_t quotient(int64_t a, int64_t b) { return b == -1 ? -a : a / b; } // INT64_MIN / -1 traps
static inline int64_t rest(int64_t a, int64_t b) { return b == -1 ? 0 : a % b; }
static inline int64_t floor_quotient(int64_t a, int64_t b) {
    return quotient(a, b) - (rest(a, b) != 0 && (a < 0) != (b < 0));
}
static inline int64_t floor_rest(int64_t a, int64_t b) {
    const int64_t r = rest(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
static inline int64_t power(int64_t x, int64_t n) {
    if (n < 0) return x == 1 ? 1 : x != -1 ? 0 : n % 2 ? -1 : 1;
    int64_t r = 1;
    for (; n; n >>= 1, x *= x) if (n & 1) r *= x;
    return r;
}
static inline double floor_remainder(double a, double b) {
    const double r = fmod(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
static inline double floor_divide(double a, double b) {
    if (b == 0) return a / b;
    const double r = fmod(a, b), q = (a - r) / b - (r != 0 && (r < 0) != (b < 0)), f = floor(q);
    return q == 0 ? copysign(0.0, a / b) : q - f > 0.5 ? f + 1 : f;
}
static inline double log_add_exp(double a, double b) {
    const double low = a != a || a < b ? a : b, high = a != a || a > b ? a : b;
    return low == high && isinf(low) ? a : log1p(exp(low - high)) + high;
}

typedef uint16_t bfloat16, float16;
static inline uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float of_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline float from_bfloat16(bfloat16 h) { return of_bits((uint32_t)h << 16); }
static inline bfloat16 to_bfloat16(float x) {
    return x != x ? 0x7fc0 : (bits(x) + 0x7fff + (bits(x) >> 16 & 1)) >> 16;
}
static inline float from_float16(float16 h) {
    const uint32_t u = (uint32_t)(h & 0x7fff) << 13;
    const float x = u < 0x0f800000 ? of_bits(u) * 0x1p112f : of_bits(u | 0x7f800000);
    return h & 0x8000 ? -x : x;
}
static inline float16 to_float16(float x) {
    const float a = fabsf(x);
    const uint32_t u = bits(a);
    return (x != x ? 0x7e00 : a >= 65520 ? 0x7c00 : a < 0x1p-14f ? (uint32_t)rintf(a * 0x1p24f)
        : (u + 0xfff + (u >> 13 & 1) - (112 << 23)) >> 13) | (bits(x) >> 16 & 0x8000);
}
"""


def emit(kernel: Kernel, name: str) -> str:
    """The kernel as a C function, which returns 0, or 1 + the number of the check that failed."""
    k = canonical(kernel)
    params = [f"{'' if p.written else 'const '}{STORAGE[p.dtype]} *{p.name}" for p in k.params]
    head = f"int {name}({', '.join(params + [f'int64_t {v.name}' for v in k.sizes])}) {{"
    return "\n".join([head, *indented([*Nest(k).lines(), "return 0;"]), "}", ""])


@dataclass
class Block:
    """Lines between two braces, and the names of the values that they compute. `around`: the block for what
    is the same at every point of this one's loops."""

    names: ChainMap[Expr, str] = field(default_factory=ChainMap)
    around: Block | None = None
    lines: list[str] = field(default_factory=list)


class Nest:
    """Writes the loops of a (canonical) kernel."""

    def __init__(self, k: Kernel) -> None:
        self.k = k
        self.stored = {p.name: p.dtype for p in k.params}
        # What differs between the points of the inner loops.
        self.inner = {a.var for a in k.inner} | {r for s in k.body if isinstance(s, Scan) for r in s.refs}
        self.dependence = Dependence()
        self.fresh = map("v{}".format, itertools.count())

    def lines(self) -> list[str]:
        """Each phase is a pass over the reduced axes, which computes again what it needs of earlier ones."""

        def full(s: Statement) -> bool:
            # Without inner loops all values of a point come before its stores, in whatever order those are.
            return not self.k.inner or is_full(s, self.inner, self.dependence)

        order = phases(self.k, full)
        point = Block()
        for phase in range(max(order, default=0) + 1):
            now = [s for s, p in zip(self.k.body, order) if p == phase]
            self.stores([s for s in now if not full(s)], point)
            each = Block(point.names.new_child(), point)
            before: list[str] = []
            after: list[str] = []
            for s in now:
                if not isinstance(s, Store):
                    self.fold(s, each, before, after)
            self.stores([s for s in now if full(s)], each)
            point.lines += [*before, *loops(self.k.inner, each.lines), *after]
        return loops(self.k.outer, point.lines)

    def value(self, root: Expr, block: Block) -> str:
        """The name of a value, which lines of the block, or around it, compute. Not by recursion: a graph may
        add up hundreds of terms."""
        stack = [root]
        while stack:
            x = stack.pop()
            if x in block.names:
                continue
            # What a mask guards is written inside of an `if`.
            reads = (x.args[0], x.args[2]) if x.op == "masked" else children(x)
            missing = [a for a in reads if a not in block.names]
            if missing:
                stack += [x, *reversed(missing)]
            else:
                fixed = self.inner.isdisjoint(self.dependence.of(x))
                self.compute(x, block.around if fixed and block.around else block)
        return block.names[root]

    def compute(self, x: Expr, block: Block) -> None:
        """Names a value whose operands have names."""
        names, lines, kind = block.names, block.lines, TYPES[x.dtype]
        if x.op in ("const", "ref"):
            names[x] = x.args[0] if x.op == "ref" else literal(x.args[0], x.dtype)
        elif x.op == "nonzero":
            names[x] = names[x.args[0]]
            lines.append(f"if ({names[x]} == 0) return 1 + {x.args[1]};")
        elif x.op == "check":
            at, size, wrap, number = x.args
            text = f"{names[at]} < 0 ? {names[at]} + {names[size]} : {names[at]}" if wrap else names[at]
            name = names[x] = next(self.fresh)
            lines.append(f"const {kind} {name} = {text};")
            lines.append(f"if ({name} < 0 || {name} >= {names[size]}) return 1 + {number};")
        elif x.op == "masked":
            inside = Block(names.new_child())
            result = self.value(x.args[1], inside)
            name = next(self.fresh)
            lines.append(f"{kind} {name} = {names[x.args[2]]};")
            lines += [f"if ({names[x.args[0]]}) {{", *indented([*inside.lines, f"{name} = {result};"]), "}"]
            names[x] = name
        else:
            text = spelled(x, names, self.stored)
            names[x] = next(self.fresh)
            lines.append(f"const {kind} {names[x]} = {text};")

    def fold(self, s: Reduce | Scan, each: Block, before: list[str], after: list[str]) -> None:
        """A step of a reduction or scan. before, after: the lines around the loops."""
        v, dtype, ref = self.value(s.value, each), s.value.dtype, s.refs[0]
        kind, acc = TYPES[dtype], f"acc_{ref}"
        if s.kind == "welford":
            before.append(f"double n_{ref} = 0, sum_{ref} = 0, mean_{ref} = 0, m2_{ref} = 0;")
            each.lines += [f"const double d_{ref} = {v} - mean_{ref};", f"n_{ref} += 1, sum_{ref} += {v};"]
            each.lines += [f"mean_{ref} += d_{ref} / n_{ref};", f"m2_{ref} += d_{ref} * ({v} - mean_{ref});"]
            results = [(kind, f"sum_{ref} / n_{ref}"), (kind, f"m2_{ref}")]
        elif s.kind.startswith("arg"):  # the first of equals, in scans the last; NaN is the best
            sign = ">" if s.kind == "argmax" else "<"
            ties = f"{v} {sign}= {acc} || {v} != {v}"
            better = ties if isinstance(s, Scan) else f"{v} {sign} {acc} || ({v} != {v} && {acc} == {acc})"
            before += [f"{kind} {acc} = {literal(identity(s.kind, dtype), dtype)};", f"int64_t at_{ref} = 0;"]
            here = ix.linearize([ix.of(a.var) for a in self.k.inner], [a.size for a in self.k.inner])
            each.lines.append(f"if ({better}) {acc} = {v}, at_{ref} = {place(here, {})};")
            results = [(kind, acc)] * isinstance(s, Scan) + [("int64_t", f"at_{ref}")]
        else:
            kind = "bool" if s.kind in ("any", "all") else kind
            wide = "double" if kind == "float" else kind  # rounding at each step would add up
            before.append(f"{wide} {acc} = {literal(identity(s.kind, dtype), dtype)};")
            each.lines.append(f"{acc} = {FOLDS[s.kind].format(acc, v)};")
            results = [(kind, acc)]
        lines = [f"const {t} {r} = {text};" for r, (t, text) in zip(s.refs, results)]
        (each.lines if isinstance(s, Scan) else after).extend(lines)

    def stores(self, stores: Sequence[Statement], block: Block) -> None:
        """All values first: a store may overwrite what another one's value loads."""
        lines: list[str] = []
        for s in stores:
            if not isinstance(s, Store):
                continue
            value, dtype = self.value(s.value, block), s.value.dtype
            for a in children(Expr("index", (s.index,), torch.int64)):
                self.value(a, block)
            there, kept = f"{s.buffer}[{place(s.index, block.names)}]", self.stored[s.buffer]
            if s.mode != "set":
                old = next(self.fresh)
                lines.append(f"const {TYPES[dtype]} {old} = {widened(there, kept)};")
                value = FOLDS[UPDATES[s.mode]].format(old, value)
            lines.append(f"{there} = {rounded(value, kept)};")
        block.lines += lines


def loops(axes: Sequence[Axis], lines: list[str]) -> list[str]:
    """Loops around lines, if there are any."""
    for a in reversed(axes if lines else ()):
        v = a.var.name
        lines = [f"for (int64_t {v} = 0; {v} < {place(a.size, {})}; ++{v}) {{", *indented(lines), "}"]
    return lines


def indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        exact = ctypes.c_float(value).value if dtype == torch.float32 else float(value)
        suffix = "f" if dtype == torch.float32 else ""
        text = f"{exact!r}{suffix}" if math.isfinite(exact) else "NAN" if exact != exact else "INFINITY"
        return f"(-{text.lstrip('-')})" if math.copysign(1, exact) < 0 and exact == exact else text
    if dtype == torch.bool:
        return "true" if value else "false"
    if value == torch.iinfo(torch.int64).min:
        return "INT64_MIN"
    text = f"INT64_C({abs(value)})" if dtype == torch.int64 else str(abs(value))
    return f"(-{text})" if value < 0 else text


def spelled(x: Expr, names: Mapping[Expr, str], stored: Mapping[str, torch.dtype]) -> str:
    """What computes a value. stored: the buffers' dtypes."""
    args = [names[a] if isinstance(a, Expr) else a for a in x.args]
    if x.op == "index":
        return place(x.args[0], names)
    if x.op == "load":
        return widened(f"{args[0]}[{place(x.args[1], names)}]", stored[args[0]])
    if x.op == "cast":
        narrow = x.args[0].dtype.is_floating_point and x.dtype in (torch.uint8, torch.int8, torch.int16)
        return f"({TYPES[x.dtype]}){'(int32_t)' if narrow else ''}{args[0]}"  # past what it holds, as eager
    if x.op == "round":
        return widened(rounded(args[0], args[1]), args[1])
    of = x.args[0].dtype
    word = WORDS[x.op] if of.is_floating_point else INTEGERS.get(x.op, WORDS[x.op])
    if x.op == "bnot" and of == torch.bool:
        word = WORDS["lnot"]
    return word.format(*args, bits=8 * x.dtype.itemsize)


def widened(text: str, dtype: torch.dtype) -> str:
    """An element of a buffer, as it is computed with."""
    return text if dtype in TYPES else f"from_{STORAGE[dtype]}({text})"


def rounded(text: str, dtype: torch.dtype) -> str:
    """A value as an element of a buffer."""
    return text if dtype in TYPES else f"to_{STORAGE[dtype]}({text})"


def place(i: Index, names: Mapping[Expr, str]) -> str:
    """An index as C."""
    if isinstance(i, int):
        return str(i)

    def atom(a: Any) -> str:
        if isinstance(a, (ix.Div, ix.Mod)):
            word = "floor_quotient" if isinstance(a, ix.Div) else "floor_rest"
            return f"{word}({place(a.num, names)}, {place(a.den, names)})"
        return f"(int64_t){names[a.payload]}" if isinstance(a, ix.Opaque) else str(a.name)

    # A term is its atoms, of which there may be none, and its coefficient.
    return " + ".join(
        "*".join([*([str(c)] if c != 1 or not mono else []), *map(atom, mono)]) for mono, c in i.terms
    )


def checks(kernel: Kernel) -> int:
    """How many run-time checks it makes: numbers below that."""
    return 1 + max((e.args[-1] for s in kernel.body for e in s.expressions if e.op in CHECKS), default=-1)


def failed(kernel: str, messages: Sequence[str], code: int) -> Exception:
    """What a kernel's return code stands for. messages: of its checks."""
    if 0 < code <= len(messages):
        return check_error(messages[code - 1])
    return VendorError(f"the kernel {kernel} of {len(messages)} checks returned {code}, which is none's code")


def compiler() -> list[str]:
    """The C compiler's command; nothing where there is none."""
    commands = map(shlex.split, (os.environ.get("CC", ""), "cc", "gcc"))
    return next((c for c in commands if c and shutil.which(c[0])), [])


def build(source: str, kernels: Mapping[str, Kernel]) -> dict[str, Callable[..., int]]:
    """The functions of a C text by name, which take addresses and sizes."""
    with tempfile.TemporaryDirectory() as folder:  # nobody else's; a library stays loaded without its file
        file, library = Path(folder, "kernels.c"), Path(folder, "kernels.so")
        file.write_text(source)
        command = [*compiler(), *FLAGS, "-o", str(library), str(file), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = dict.fromkeys(line for k in kernels.values() for line in k.origins)
            todo = "repair what toy_loops writes: DICP_DUMP=<folder> keeps kernels.c"
            said = done.stderr[:2000].replace(f"{folder}{os.sep}", "")
            raise BuildError(f"{command[0]} refused the kernels", message=said, where=[*lines], todo=todo)
        loaded = ctypes.CDLL(str(library))
    for name, k in kernels.items():
        getattr(loaded, name).argtypes = [ctypes.c_void_p] * len(k.params) + [ctypes.c_int64] * len(k.sizes)
    return {name: getattr(loaded, name) for name in kernels}


class ToyLoopsRunner(Runner):
    """Writes the program's Python function: a kernel is called on addresses, a claim writes its own line."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, {})
        self.kernels = program.kernel_names()

    def _native(self, segment: Segment) -> None:
        for item in segment.items:
            if isinstance(item, Launch):
                args = [f"{self.flat(b)}.data_ptr()" for b in item.buffers]
                args += [v.name for v in item.kernel.sizes]
                name, first = self.kernels[item.kernel.digest], item.first_check
                self.line(f"code = {name}({', '.join(args)})")
                messages = f"MESSAGES[{first}:{first + checks(item.kernel)}]"
                self.line(f"if code: raise failed({name!r}, {messages}, code)")
            else:
                self.claimed(item)

    def flat(self, b: Buffer) -> str:
        return self.view(View(b, (0 if 0 in b.shape else b.span,), (1,)))


def emit_out(writer: ToyLoopsRunner, call: Call) -> None:
    """torch.mm(a, b, out=c), and the like."""
    args = [*map(writer.value, call.args), f"out={writer.into(call.outputs[0])}"]
    writer.line(f"torch.{call.node.target._opname}({', '.join(args)})", call.note)


def emit_new(writer: ToyLoopsRunner, call: Call) -> None:
    """A call that allocates its result."""
    args = ", ".join(map(writer.value, call.args))
    writer.line(f"result = torch.ops.aten.{call.node.target._opname}({args})", call.note)
    writer.keep(call, "result")


CLAIMS = {op: Claim(op._opname, emit_out, out=True) for op in (aten.mm.default, aten.bmm.default)}
CLAIMS[aten.convolution.default] = Claim("convolution", emit_new)


class ToyLoops:
    """See dicp.vendor.base.Vendor."""

    name, device = "toy_loops", "cpu"
    words = frozenset(WORDS) | REDUCTIONS | {"scan"}

    def available(self, config: Any) -> str | None:
        return None if compiler() else "there is no C compiler: install gcc, or set CC to one"

    def supports(self, target: Any, node: fx.Node) -> bool:
        return False

    def keeps(self, op: Any) -> bool:
        return op in CLAIMS

    def claim(self, node: fx.Node, config: Any) -> Claim | None:
        return CLAIMS.get(node.target)

    def machine(self, config: Any) -> Machine:
        return Machine(threads=1)

    def fingerprint(self, config: Any) -> str:
        return f"toy_loops 1, {shlex.join(compiler())}"

    def assemble(self, program: Program, config: Any) -> Callable[[list[Any]], Any]:
        texts = emitted(program, emit)
        program.sources = {"kernels.c": "\n".join([RUNTIME, *texts.values()])}
        runner = ToyLoopsRunner(program)
        runner.globals |= {"failed": failed, "MESSAGES": program.lowered.checks}
        distinct = {runner.kernels[x.kernel.digest]: x.kernel for x in program.launches}
        runner.globals |= build(program.sources["kernels.c"], distinct) if distinct else {}
        call = runner.function()
        program.sources["call.py"] = runner.source
        return call


vendor = ToyLoops()
backend = dicp.backend(vendor)
