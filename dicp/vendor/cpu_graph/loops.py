"""Loop shapes, and the text of loops.

pointwise   for outer.. { for vector axis { load, compute, store } }
rows        for outer.. { for each phase { for reduced axis, vectors along it { accumulate } combine
lanes } }
columns     for outer.. { for vectors of results { for reduced axis { accumulate in lanes } store } }
            of scatters that may meet: for outer.. { for runs of columns { for serial axis { for vectors {
update } } } }
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.ir.kernel import Axis, Kernel, Scan, Store, places
from dicp.vendor.cpu_graph.expression import index_text
from dicp.vendor.cpu_graph.lane_strides import Walk, is_read, walk

RUN = 8  # vectors that a thread's run of a scatter's columns has at least
PARALLEL_WORK = 1 << 15  # element operations below which starting threads costs more than it brings
INDENT = "  "


@dataclass(frozen=True)
class Shape:
    """The loop shape: its kind, the vectorised axis (None: scalar loops), the axes around and inside it."""

    kind: str
    vector: Axis | None
    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...]


def choose_shape(kernel: Kernel, lanes: int) -> Shape:
    """Vectorise along the axis that most accesses walk contiguously, each as far as it fills vectors. Where
    there are inner axes, along the one that fewest walk in strides, of those accesses that move along an
    inner axis: all others happen once per outer point.
    """
    inner = tuple(a for a in kernel.axes if a.reduced or a.serial)
    outer = tuple(a for a in kernel.axes if not (a.reduced or a.serial))
    stores = {s.index for s in kernel.body if isinstance(s, Store)}
    found = [i for _, i in places(kernel.body)]
    every = list(dict.fromkeys(found))
    moving = [i for i in found if any(ix.depends(i, a.var) for a in inner)]

    def votes(a: Axis, among: list[Index]) -> int:
        return sum(2 if i in stores else 1 for i in among if ix.moves_by_one(i, a.var))

    def filled(a: Axis) -> float:
        return min(1.0, a.size / lanes) if isinstance(a.size, int) else 1.0

    def walked(a: Axis) -> tuple[int, int]:
        """Accesses whose elements a vector reaches one by one, and (as a negative) at once: the less the
        better."""
        along = [i for i in moving if ix.depends(i, a.var)]
        together = sum(reached_at_once(i, a) for i in along)
        return len(along) - together, -together

    def reached_at_once(i: Index, a: Axis) -> bool:
        return ix.moves_by_one(i, a.var) if is_read(i) else walk(i, a.var, lanes) == Walk.TOGETHER

    if not inner:
        # operands at equal positions count each: they would each be transposed
        best = max(outer, key=lambda a: (votes(a, found) * filled(a), outer.index(a)), default=None)
        rest = tuple(a for a in outer if a is not best)
        return Shape("pointwise", best, rest, ())
    best = min(outer, key=lambda a: (walked(a), -votes(a, every), -outer.index(a)), default=None)
    last = inner[-1]
    scalar_rows = last.serial or any(isinstance(s, Scan) for s in kernel.body)
    extent = ix.product(a.size for a in inner)
    short = isinstance(extent, int) and extent < 2 * lanes
    by_rows = any(ix.moves_by_one(i, last.var) for i in moving)
    better = best is not None and not scalar_rows and walked(best) < walked(last)
    if best is not None and votes(best, every) > 0 and (not by_rows or short or better or last.serial):
        return Shape("columns", best, tuple(a for a in outer if a is not best), inner)
    return Shape("rows", None if scalar_rows else last, outer, inner)


def vector_loop(
    axis: Axis, lines: list[str], lanes: int, fresh: Callable[[str], str], run: tuple[str, str] | None = None
) -> list[str]:
    """Vectors along one axis: whole ones, then the tail. run: from where to where, in place of all; as many
    whole vectors, but for the last run."""
    v, (first, n) = axis.var.name, run or ("0", _size(axis.size))
    if isinstance(axis.size, int) and axis.size % lanes == 0:
        return [
            f"for (int64_t {v} = {first}; {v} < {n}; {v} += LANES) {{",
            *indent(["constexpr Full lanes;", *lines]),
            "}",
        ]
    if isinstance(axis.size, int) and axis.size < lanes:
        return [
            "{",
            *indent([f"constexpr int64_t {v} = 0;", f"constexpr Lanes lanes{{{n}}};", *lines]),
            "}",
        ]
    step = fresh("step")
    return [
        f"const auto {step} = [&](int64_t {v}, auto lanes) {{",
        *indent(lines),
        "};",
        "{",
        INDENT + f"int64_t {v} = {first};",
        INDENT + f"for (; {v} + LANES <= {n}; {v} += LANES) {step}({v}, Full{{}});",
        INDENT + f"if ({v} < {n}) {step}({v}, lanes_left({n} - {v}));",
        "}",
    ]


def unrolled(axis: Axis, lines: list[str], first: str, times: int) -> list[str]:
    """Several vectors at once, from `first` on; lines know the number of theirs as u."""
    step = [f"const int64_t {axis.var.name} = {first} + u * LANES;", *lines]
    return [f"#pragma GCC unroll {times}", f"for (int u = 0; u < {times}; ++u) {{", *indent(step), "}"]


def unrolled_vector_loop(axis: Axis, lines: list[str], times: int, fresh: Callable[[str], str]) -> list[str]:
    """The same along one axis, which whole numbers of them fill."""
    first = fresh("first")
    return [
        f"for (int64_t {first} = 0; {first} < {axis.size}; {first} += {times} * LANES) {{",
        *indent(["constexpr Full lanes;", *unrolled(axis, lines, first, times)]),
        "}",
    ]


def shared_vector_loop(axis: Axis, lines: list[str], lanes: int, fresh: Callable[[str], str]) -> list[str]:
    """The same as one plain loop, so that threads can share it."""
    v, n = axis.var.name, _size(axis.size)
    head = f"for (int64_t {v} = 0; {v} < {n}; {v} += LANES) {{"
    if isinstance(axis.size, int) and axis.size % lanes == 0:
        return [head, *indent(["constexpr Full lanes;", *lines]), "}"]
    step = fresh("step")
    return [
        head,
        *indent(
            [
                f"const auto {step} = [&](auto lanes) {{",
                *indent(lines),
                "};",
                f"if ({v} + LANES <= {n}) {step}(Full{{}});",
                f"else {step}(lanes_left({n} - {v}));",
            ]
        ),
        "}",
    ]


def block_loop(
    axis: Axis, block: str, lines: list[str], lanes: int, run: tuple[str, str] | None = None
) -> list[str]:
    """Blocks of LANES points of an axis, `columns` of them in the last. run: from where to where, in place of
    all."""
    n = _size(axis.size)
    first, end = run or ("0", n)
    whole = isinstance(axis.size, int) and axis.size % lanes == 0
    count = "LANES" if whole else f"{n} - {block} < LANES ? {n} - {block} : LANES"
    columns = f"const{'expr' if whole else ''} int64_t columns = {count};"
    head = f"for (int64_t {block} = {first}; {block} < {end}; {block} += LANES) {{"
    return [head, *indent([columns, *lines]), "}"]


def runs(axes: tuple[Axis, ...], along: Axis, lanes: int) -> int | None:
    """Elements of `along` that one thread keeps, where the axes have too few points for all threads."""
    if not isinstance(along.size, int):
        return RUN * lanes
    if not few(axes):
        return None
    share = -(-along.size // (2 * torch.get_num_threads()))
    run = max(RUN * lanes, -(-share // lanes) * lanes)
    return run if run < along.size else None


def run_loop(along: Axis, run: int, first: str, lines: list[str]) -> list[str]:
    """Runs of an axis, from `first` to what `run_end` says."""
    n = _size(along.size)
    return [f"for (int64_t {first} = 0; {first} < {n}; {first} += {run}) {{", *indent(lines), "}"]


def run_end(along: Axis, run: int, first: str) -> str:
    """Declares the `end` of a run: not by its head, as threads may share the next loop too."""
    n = _size(along.size)
    if isinstance(along.size, int) and along.size % run == 0:
        return f"const int64_t end = {first} + {run};"
    return f"const int64_t end = {first} + {run} < {n} ? {first} + {run} : {n};"


def few(axes: tuple[Axis, ...], extent: Index = 1, step: int = 1) -> bool:
    """Whether the axes, with an extent in steps, have too few points to keep all threads busy."""
    count = ix.product([*(a.size for a in axes), ix.floordiv(extent + (step - 1), step)])
    return isinstance(count, int) and count < 2 * torch.get_num_threads()


def around(kernel: Kernel, axes: tuple[Axis, ...], lines: list[str], extra: int = 0) -> list[str]:
    """The outer loops, shared between threads when the work is worth it. `extra` loops of `lines` join
    them."""
    lines = nested(axes, lines)
    loops = len(axes) + extra
    if not loops:
        return lines
    work = ix.product(a.size for a in kernel.axes)
    weight = max(1, sum(ex.cost(s.value) for s in kernel.body) // 4)
    if isinstance(work, int):
        if work * weight < PARALLEL_WORK:
            return lines
        condition = ""
    else:
        condition = f" if (({index_text(work, lambda a: a.name)}) * {weight} >= {PARALLEL_WORK})"  # type: ignore[attr-defined]
    collapse = f" collapse({loops})" if loops > 1 else ""
    return [f"#pragma omp parallel for{collapse} schedule(static){condition}", *lines]


def _size(n: Index) -> str:
    text = index_text(n, lambda a: a.key)
    return text if text.isalnum() else f"({text})"


def nested(axes: tuple[Axis, ...], lines: list[str]) -> list[str]:
    """Plain loops over the axes."""
    for a in reversed(axes):
        lines = [for_line(a), *indent(lines), "}"]
    return lines


def for_line(a: Axis) -> str:
    v = a.var.name
    return f"for (int64_t {v} = 0; {v} < {_size(a.size)}; ++{v}) {{"


def indent(lines: list[str]) -> list[str]:
    return [INDENT + line if not line.startswith("#") else line for line in lines]
