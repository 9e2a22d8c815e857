"""Kernel forms: lines, planes, rows in registers and in loops, columns, scans, scatters, sizes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from kernels import TARGETS, compile_everywhere, load, pointwise, reference, run

from dicp.config import Config
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Var
from dicp.ir.kernel import Axis, Kernel, Param, Reduce, Scan, Store
from dicp.vendor.cuda_graph import codegen, launch, tiles
from dicp.vendor.cuda_graph.assemble import programs_function

REDUCTIONS = ["sum", "prod", "max", "min", "argmax", "argmin", "welford"]
SCANS = ["sum", "max", "min", "logsumexp", "argmax", "argmin"]
# rows in registers (with and without a tail), in a loop (of whole vectors or not), columns in both
SHAPES = [(5, 64, True), (7, 100, True), (2, 20000, True), (3, 17003, True), (33, 10, False), (40, 1100, False)]


@pytest.fixture(scope="module")
def config(cuda_cache: str) -> Config:
    return Config.make(options={"cache_dir": cuda_cache})


def rows_kernel(
    statement: type, kind: str, m: int, n: int, rows: bool, dtype: torch.dtype = torch.float32
) -> Kernel:
    """A reduction or scan of x[m, n] (or of x[n, m] along its columns), its results doubled."""
    i, r = Var("i", m), Var("r", n)
    a, b = ix.of(i), ix.of(r)
    at = a * n + b if rows else b * m + a
    refs = {"welford": ("mean", "m2")}.get(
        kind, ("best", "where") if statement is Scan and "arg" in kind else ("y",)
    )
    position = torch.int64
    kinds = {"y": position if kind.startswith("arg") else dtype, "where": position}
    body: list = [statement(refs, kind, load("x", at, dtype))]
    params = [Param("x", dtype, False)]
    for ref in refs:
        d = kinds.get(ref, dtype)
        value = Expr("ref", (ref,), d)
        spot = at if statement is Scan else a
        body.append(Store(f"out_{ref}", spot, value + value if d != torch.bool else value))
        params.append(Param(f"out_{ref}", d, True, False))
    return Kernel("rows", (Axis(i), Axis(r, reduced=True)), tuple(params), (), tuple(body))


def agree(
    kernel: Kernel, tensors: list[torch.Tensor], sizes: tuple[int, ...], config: Config, **how: float
) -> None:
    got, want = run(kernel, tensors, sizes, config), reference(kernel, tensors, sizes)
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, equal_nan=True, **how)


def test_sums_of_hundreds_of_terms(config: Config) -> None:
    """More than Python's recursion goes through."""
    i = ix.of(Var("i", 40))
    total = x = load("x", i)
    for k in range(400):
        total = total + x * float(k % 3)
    kernel = pointwise(total, 40, {"x": torch.float32})
    agree(kernel, [torch.randn(40), torch.zeros(40)], (), config)


def outputs(kernel: Kernel, x: torch.Tensor, m: int, scan: bool) -> list[torch.Tensor]:
    return [torch.zeros(x.numel() if scan else m, dtype=p.dtype) for p in kernel.params[1:]]


def odd_rows(
    dtype: torch.dtype, m: int = 5, n: int = 17003, offset: int = 0, apart: int | None = None
) -> Kernel:
    """x / max(x) of each row, and whether it is above 0: rows that lie somewhere, by default one behind the
    other."""
    i, r = Var("i", m), Var("r", n)
    at = ix.of(i) * n + ix.of(r)
    place = at + offset if apart is None else ix.of(i) * apart + ix.of(r) + offset
    x, top = ex.cast(load("x", place, dtype), torch.float32), Expr("ref", ("top",), torch.float32)
    body = (
        Reduce(("top",), "max", x),
        Store("y", at, ex.cast(x / top, dtype)),
        Store("above", at, Expr("gt", (x, Expr("const", (0.0,), torch.float32)), torch.bool)),
    )
    params = (Param("x", dtype, False), Param("y", dtype, True, False), Param("above", torch.bool, True, False))
    return Kernel("rows", (Axis(i), Axis(r, reduced=True)), params, (), body)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_begin_at_no_whole_vector(dtype: torch.dtype, offset: int, config: Config) -> None:
    kernel = odd_rows(dtype, offset=offset)
    x = torch.randn(5 * 17003 + offset).to(dtype)
    y, above = torch.full((2, x.numel() - offset), 7.0).to(dtype)[0], torch.zeros(x.numel() - offset).bool()
    agree(kernel, [x, y, above], (), config, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("n, apart, offset", [(17008, 17011, 0), (17003, 17008, 0), (17008, 17040, 3)])
def test_rows_apart_that_begin_or_end_at_no_whole_vector(n: int, apart: int, offset: int, config: Config) -> None:
    kernel = odd_rows(torch.float32, n=n, apart=apart, offset=offset)
    assert tiles.choose_tile(kernel).begin is not None
    x, y = torch.randn(5 * apart + offset), torch.zeros(5 * n)
    agree(kernel, [x, y, y.bool()], (), config, rtol=1e-5, atol=1e-7)


def test_rows_of_whole_vectors_are_plain(config: Config) -> None:
    assert tiles.choose_tile(odd_rows(torch.float32, n=17008, apart=17040, offset=16)).begin is None


def test_rows_of_a_buffer_that_begins_at_no_whole_vector(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = codegen.emit(odd_rows(torch.float32), interpreted=True)
    assert source.constants["V"] == 16
    call = launch.InterpretedKernel(source, launch.load(source, config), programs_function(source))
    widths: list[int] = []
    run_with = type(call.run).__getitem__

    def noted(self: object, grid: tuple[int, ...]) -> object:
        run = run_with(self, grid)
        return lambda *args, **constants: (widths.append(constants["V"]), run(*args, **constants))

    monkeypatch.setattr(type(call.run), "__getitem__", noted)
    x = torch.randn(5 * 17003)
    for offset in (0, 1):
        given = torch.empty(x.numel() + 1)[offset : offset + x.numel()].copy_(x)
        y, above = torch.empty_like(x), torch.empty(x.numel()).bool()
        call(False, given, y, above)
        rows = x.view(5, -1)
        torch.testing.assert_close(y.view(5, -1), rows / rows.amax(1, True))
        assert torch.equal(above, x > 0)
    assert widths == [16, 1]


def test_rows_that_begin_at_no_whole_vector_are_read_and_written_by_vectors(config: Config) -> None:
    """And element by element where a buffer begins at no whole vector."""
    source = codegen.emit(odd_rows(torch.bfloat16, n=50257))
    fn = launch.load(source, config)
    aligned, other = (
        launch.compile_for(source, fn, TARGETS[1], aligned=a).asm["ptx"] for a in (True, False)
    )
    loads = set(re.findall(r"ld\.global\S*", aligned))
    assert loads == {f"ld.global.L1::evict_{when}.L2::cache_hint.v4.b32" for when in ("last", "first")}
    assert "st.global.cs.v4.b32" in aligned
    assert ".v4.b32" not in other and "ld.global.L1::evict_last.L2::cache_hint.b16" in other


def test_rows_read_again_stay_in_the_cache(config: Config) -> None:
    """What is read again is kept until then, results give way; nothing is said of rows that are read once."""
    again = codegen.emit(odd_rows(torch.float32, n=40000)).text
    assert 'cache_modifier=".cs"' in again
    assert again.index('"evict_first"') > again.rindex('"evict_last"')
    once = codegen.emit(odd_rows(torch.float32, n=4000)).text
    assert "evict" not in once and "cache_modifier" not in once


def test_kernels_are_compiled_without_contractions(config: Config) -> None:
    """Copies of an expression in two kernels give the same bits, whatever stands around them."""
    i = Var("i", 4096)
    x = load("x", ix.of(i), torch.float32)
    params = (Param("x", torch.float32, False), Param("y", torch.float32, True, False))
    source = codegen.emit(Kernel("squares", (Axis(i),), params, (), (Store("y", ix.of(i), x * x + x),)))
    ptx = launch.compile_for(source, launch.load(source, config), TARGETS[1]).asm["ptx"]
    assert "mul" in ptx and "fma" not in ptx and "mad" not in ptx.replace("mad.lo", "")


def softmax_sums(n: int, dtype: torch.dtype = torch.float32) -> Kernel:
    """Of rows of x: the maximum, the sum of exp(x - maximum), and exp(x - maximum) over that."""
    i, r = Var("i", 6), Var("r", n)
    at = ix.of(i) * n + ix.of(r)
    x, top, total = (load("x", at, dtype), *(Expr("ref", (name,), dtype) for name in ("top", "total")))
    e = Expr("exp", (x - top,), dtype)
    body = (
        Reduce(("top",), "max", x),
        Reduce(("total",), "sum", e),
        Store("y", at, e / total),
        Store("m", ix.of(i), top),
        Store("s", ix.of(i), total),
    )
    params = (Param("x", dtype, False), *(Param(name, dtype, True, False) for name in "yms"))
    return Kernel("softmax", (Axis(i), Axis(r, reduced=True)), params, (), body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [17003, 32768])
def test_the_sum_of_a_softmax_is_made_while_its_maximum_is_found(
    n: int, dtype: torch.dtype, config: Config
) -> None:
    x = torch.randn(6, n, dtype=dtype) * 30
    x[1, :] = -torch.inf
    x[2, 5] = torch.inf
    x[3, 7] = torch.nan
    x[4, : n // 2] = -torch.inf
    x[5, -1] = 1000.0
    kernel = softmax_sums(n, dtype)
    tensors = [x.flatten(), torch.zeros(6 * n, dtype=dtype), *(torch.zeros(6, dtype=dtype) for _ in range(2))]
    agree(kernel, tensors, (), config, rtol=1e-5, atol=1e-7)
    text = codegen.emit(kernel).text
    assert text.count("d.grow_softmax(") == 1 + bool(n % 8192) and text.count("d.row_softmax(") == 1


def test_the_sum_of_a_softmax_takes_no_exchange_between_threads(config: Config) -> None:
    source = codegen.emit(softmax_sums(32768))
    text = launch.compile_for(source, launch.load(source, config), TARGETS[1]).asm["ttgir"]
    loop = text[text.index("scf.for") : text.index("scf.yield")]
    assert "tt.reduce" in loop and "convert_layout" not in loop


@pytest.mark.parametrize("m, n, rows", SHAPES)
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reductions(kind: str, m: int, n: int, rows: bool, config: Config) -> None:
    kernel = rows_kernel(Reduce, kind, m, n, rows)
    x = torch.randn(m * n) if kind != "prod" else 1 + torch.randn(m * n) / n
    agree(kernel, [x, *outputs(kernel, x, m, False)], (), config, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [17003, 17008, 20000])
@pytest.mark.parametrize("kind", ["argmax", "argmin"])
def test_of_equals_in_a_long_row_the_first_counts(kind: str, n: int, config: Config) -> None:
    """Rows of no whole number of vectors, too, whose steps at the ends are apart from the others."""
    kernel = rows_kernel(Reduce, kind, 6, n, True)
    x = torch.randint(0, 8, (6, n)).float()
    x[0], x[1] = 0.0, torch.inf if kind == "argmin" else -torch.inf
    x[2, [3, 515, 9000]] = torch.nan  # a step of the interpreter's apart
    x[3, [600, 12000]], x[4, [n - 1, 700]] = 100.0, -100.0
    agree(kernel, [x.flatten(), *outputs(kernel, x, 6, False)], (), config)


@pytest.mark.parametrize("kind", ["max", "min", "argmax", "argmin", "sum"])
def test_reductions_of_nan_and_infinities(kind: str, config: Config) -> None:
    kernel = rows_kernel(Reduce, kind, 6, 100, True)
    x = torch.randn(6, 100)
    x[0, 7], x[1, 3], x[1, 50], x[2], x[3, 5] = (
        float("nan"),
        float("nan"),
        float("nan"),
        float("-inf"),
        float("inf"),
    )
    x[4] = float("inf")
    agree(kernel, [x.flatten(), *outputs(kernel, x, 6, False)], (), config, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("m, n", [(5, 100), (2, 1500)])
@pytest.mark.parametrize("kind", ["any", "all"])
def test_reductions_of_bools(kind: str, m: int, n: int, config: Config) -> None:
    kernel = rows_kernel(Reduce, kind, m, n, True, torch.bool)
    x = torch.rand(m * n) < (0.001 if kind == "any" else 0.999)
    agree(kernel, [x, *outputs(kernel, x, m, False)], (), config)


@pytest.mark.parametrize("m, n, rows", [(5, 100, True), (2, 700, True), (33, 70, False)])
@pytest.mark.parametrize("kind", SCANS)
def test_scans(
    kind: str, m: int, n: int, rows: bool, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "PERSISTENT", 512)  # longer ones run in a loop
    kernel = rows_kernel(Scan, kind, m, n, rows)
    x = torch.randn(m * n)
    agree(kernel, [x, *outputs(kernel, x, m, True)], (), config, rtol=1e-3, atol=1e-3)


def softmax_kernel(m, n, name: str = "softmax") -> Kernel:  # type: ignore[no-untyped-def]
    """Three phases: the maximum, the sum, the quotients."""
    i, r = Var("i", m), Var("r", n)
    at = ix.of(i) * n + ix.of(r)
    x = load("x", at)
    top, total = Expr("ref", ("top",), torch.float32), Expr("ref", ("total",), torch.float32)
    e = ex.unary("exp", x - top)
    sizes = tuple(
        v for v in {*ix.atoms(m * 1 if isinstance(m, int) else m), *ix.atoms(n)} if isinstance(v, Var)
    )
    return Kernel(
        name,
        (Axis(i), Axis(r, reduced=True)),
        (Param("x", torch.float32, False), Param("y", torch.float32, True)),
        tuple(sorted(sizes, key=lambda v: v.name)),
        (Reduce(("top",), "max", x), Reduce(("total",), "sum", e), Store("y", at, e / total)),
    )


@pytest.mark.parametrize("m, n", [(9, 77), (2, 20000)])
def test_phases(m: int, n: int, config: Config) -> None:
    x = torch.randn(m * n)
    agree(softmax_kernel(m, n), [x, torch.zeros(m * n)], (), config, rtol=1e-4, atol=1e-7)


def test_symbolic_sizes(config: Config) -> None:
    s = [ix.of(Var(f"s{k}", None, 2)) for k in range(2)]
    kernel = softmax_kernel(*s)
    for m, n in ((3, 50), (1, 700)):
        x = torch.randn(m * n)
        agree(kernel, [x, torch.zeros(m * n)], (m, n), config, rtol=1e-4, atol=1e-7)


def columns(results: int, rows: int, dtype: torch.dtype, per_row: int = 0) -> Kernel:
    """Sums of columns of a matrix, of products with `per_row` vectors that have an element for each row."""
    i, j = Var("i", results), Var("j", rows)
    value = Expr("load", ("x", ix.of(j) * results + ix.of(i)), dtype)
    for k in range(per_row):
        value = Expr("mul", (value, Expr("load", (f"w{k}", ix.of(j)), dtype)), dtype)
    given = [Param("x", dtype, False), *(Param(f"w{k}", dtype, False) for k in range(per_row))]
    return Kernel(
        "columns",
        (Axis(i), Axis(j, reduced=True)),
        (*given, Param("y", torch.float32, True, False)),
        (),
        (Reduce(("t",), "sum", value), Store("y", ix.of(i), Expr("ref", ("t",), torch.float32))),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [32, 1000])
def test_columns_are_read_by_whole_lines(dtype: torch.dtype, rows: int) -> None:
    """128 bytes of neighbours at the least; a thread has 32 elements, either way."""
    kernel = columns(1 << 17, rows, dtype)
    blocks = tiles.choose_blocks(kernel, tiles.choose_tile(kernel))
    assert blocks.x * dtype.itemsize >= 128
    assert blocks.x * blocks.r // (32 * blocks.warps) == 32


def test_columns_of_several_values_take_fewer_a_thread() -> None:
    kernel = columns(1 << 17, 1000, torch.bfloat16)
    reduce, store = kernel.body
    square = Expr("mul", (reduce.value, Expr("load", ("z", reduce.value.args[1]), torch.bfloat16)), torch.bfloat16)
    both = (*kernel.params, Param("z", torch.bfloat16, False))
    kernel = replace(kernel, params=both, body=(replace(reduce, value=square), store))
    blocks = tiles.choose_blocks(kernel, tiles.choose_tile(kernel))
    assert blocks.x * blocks.r // (32 * blocks.warps) == 16


def test_what_a_row_has_does_not_make_columns_rows() -> None:
    """As in the gradients of a norm's weight: two statistics of each row are read along what is summed over.
    In parts of the rows as well."""
    kernel = columns(768, 2048, torch.float32, per_row=2)
    assert not tiles.choose_tile(kernel).contiguous
    part = Var("p", 4)
    swap = {kernel.axes[1].var: ix.of(part) * 512 + ix.of(Var("j", 512))}
    body = [replace(s, value=index_in(s.value, swap)) for s in kernel.body if isinstance(s, Reduce)]
    axes = (Axis(part), kernel.axes[0], Axis(Var("j", 512), reduced=True))
    assert not tiles.choose_tile(replace(kernel, axes=axes, body=(*body, kernel.body[1]))).contiguous


def index_in(e: Expr, swap: dict[Var, ix.Index]) -> Expr:
    """An expression whose positions are others."""
    if e.op == "load":
        return Expr("load", (e.args[0], ix.substitute(e.args[1], swap)), e.dtype)
    return Expr(e.op, tuple(index_in(a, swap) if isinstance(a, Expr) else a for a in e.args), e.dtype)


@pytest.mark.parametrize(
    ("results", "rows", "whole"), [(768, 32, True), (64, 1024, True), (64, 1025, False), (8192, 128, False)]
)
def test_short_or_cached_columns_are_one_tile(results: int, rows: int, whole: bool) -> None:
    assert tiles.choose_tile(columns(results, rows, torch.float32)).persistent == whole


@pytest.mark.parametrize("length", [16390, 20480, 32000, 32768, 50257])
def test_long_rows_are_looped_over_in_steps(length: int) -> None:
    """A last step that reaches beyond the end is masked."""
    i, j = Var("i", 4096), Var("j", length)
    value = Expr("load", ("x", ix.of(i) * length + ix.of(j)), torch.bfloat16)
    kernel = Kernel(
        "sums",
        (Axis(i), Axis(j, reduced=True)),
        (Param("x", torch.bfloat16, False), Param("y", torch.float32, True, False)),
        (),
        (Reduce(("t",), "sum", value), Store("y", ix.of(i), Expr("ref", ("t",), torch.float32))),
    )
    tile = tiles.choose_tile(kernel)
    blocks = tiles.choose_blocks(kernel, tile)
    assert blocks.r == tiles.LONG_LOOP_ROW and tiles.row_has_tail(tile, blocks) == (length != 32768)


def test_transposition_is_a_plane(config: Config) -> None:
    i, j = Var("i", 50), Var("j", 37)
    kernel = Kernel(
        "transpose",
        (Axis(i), Axis(j)),
        (Param("x", torch.float32, False), Param("y", torch.float32, True, False)),
        (),
        (Store("y", ix.of(i) * 37 + ix.of(j), load("x", ix.of(j) * 50 + ix.of(i)) * 2),),
    )
    assert tiles.choose_tile(kernel).form == "plane"
    agree(kernel, [torch.randn(1850), torch.zeros(1850)], (), config)


def scatter_kernel(mode: str, dtype: torch.dtype, targets: int = 5) -> Kernel:
    i = Var("i", 60)
    spot = ix.of(ix.Opaque(load("at", ix.of(i), torch.int64), targets))
    return Kernel(
        "scatter",
        (Axis(i, serial=True),),
        (Param("at", torch.int64, False), Param("x", dtype, False), Param("y", dtype, True)),
        (),
        (Store("y", spot, load("x", ix.of(i), dtype), mode, unique=False),),
    )


@pytest.mark.parametrize(
    "mode, dtype",
    [
        ("add", torch.float32),
        ("add", torch.int32),
        ("max", torch.float32),
        ("min", torch.float64),
        ("min", torch.int64),
        ("mul", torch.float32),
        ("add", torch.int8),
        ("max", torch.int16),
    ],
)
def test_scatters_that_meet(mode: str, dtype: torch.dtype, config: Config) -> None:
    """Atomics where there are such; the rest one by one."""
    x, y = torch.randint(1, 3, (60,)).to(dtype), torch.ones(5, dtype=dtype)
    agree(scatter_kernel(mode, dtype), [torch.randint(0, 5, (60,)), x, y], (), config)


NEGATIVE_NAN = torch.tensor(-(1 << 22), dtype=torch.int32).view(torch.float32).item()


@pytest.mark.parametrize("nan", [torch.nan, NEGATIVE_NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_largest_and_the_smallest_with_nan(
    mode: str, dtype: torch.dtype, nan: float, config: Config
) -> None:
    """In what is scattered or in memory before, whatever comes with it and in which order."""
    numbers = torch.tensor([1.0, -2.0, 0.0, -0.0, torch.inf, -torch.inf, 3.0, -4.0, 5.0, -6.0]).to(dtype)
    kernel = scatter_kernel(mode, dtype, 10)
    at, x, y = torch.randint(0, 10, (60,)), numbers[torch.randint(0, 10, (60,))], numbers[torch.randperm(10)]
    x[at == 2], y[3], y[4] = -x[at == 2].abs(), nan, nan
    x[torch.randperm(60)[:6]] = nan
    agree(kernel, [at, x, y], (), config)
    source = codegen.emit(kernel)
    assert "d.atomic_" in source.text and compile_everywhere([source], config) == 3


def test_several_outputs_and_a_masked_load(config: Config) -> None:
    i = Var("i", 40)
    at = ix.of(i)
    inside = ex.at_least(at, 8)
    padded = ex.masked(inside, lambda: load("x", at - 8), -1.0)
    kernel = Kernel(
        "pad",
        (Axis(i),),
        (
            Param("x", torch.float32, False),
            Param("y", torch.float32, True, False),
            Param("z", torch.bool, True, False),
        ),
        (),
        (Store("y", at, padded), Store("z", at, padded > 0)),
    )
    agree(kernel, [torch.randn(32), torch.zeros(40), torch.zeros(40, dtype=torch.bool)], (), config)


def test_warps_have_read_what_a_row_overwrites(config: Config) -> None:
    """A row's value, which each of its warps reads, and its new one: the store waits for them all."""
    m, n = 6, 2048
    i, r = Var("i", m), Var("r", n)
    at = ix.of(i) * n + ix.of(r)
    x, scale, top = load("x", at), load("scale", ix.of(i)), Expr("ref", ("top",), torch.float32)
    new = ex.binary("maximum", scale * 0.5, top)
    kernel = Kernel(
        "scaled",
        (Axis(i), Axis(r, reduced=True)),
        (
            Param("x", torch.float32, False),
            Param("scale", torch.float32, True),
            Param("y", torch.float32, True, False),
        ),
        (),
        (Reduce(("top",), "max", x), Store("y", at, x * scale), Store("scale", ix.of(i), new)),
    )
    assert codegen.emit(kernel).text.count("tl.debug_barrier()") == 1
    assert "debug_barrier" not in codegen.emit(softmax_kernel(4, 1000)).text
    agree(kernel, [torch.randn(m * n), torch.rand(m), torch.zeros(m * n)], (), config)


def test_scatters_one_by_one_reach_beyond_32_bits(config: Config) -> None:
    from dicp.vendor.cuda_graph import launch

    source = codegen.emit(scatter_kernel("mul", torch.float32))
    wide = launch.compile_for(source, launch.load(source, config), TARGETS[1], wide=True)
    assert "arith.extsi %count : i32 to i64" in wide.asm["ttir"]


def test_64_bit_positions_compile(config: Config) -> None:
    from dicp.vendor.cuda_graph import launch

    source = codegen.emit(softmax_kernel(4, 1000))
    wide = launch.compile_for(source, launch.load(source, config), TARGETS[1], wide=True)
    assert "i64" in wide.asm["ttir"]


def test_all_forms_compile_for_all_targets(config: Config) -> None:
    kernels = [
        rows_kernel(Reduce, kind, m, n, rows)
        for kind in ("sum", "argmax", "welford")
        for m, n, rows in SHAPES[1:]
    ]
    kernels += [
        rows_kernel(Scan, kind, 5, n, True) for kind in ("sum", "argmin", "logsumexp") for n in (100, 20000)
    ]
    kernels += [softmax_kernel(9, 77), softmax_kernel(2, 20000)]
    sources = [codegen.emit(k) for k in kernels]
    assert compile_everywhere(sources, config) == 3 * len(sources)


def test_equal_kernels_give_equal_text() -> None:
    assert codegen.emit(softmax_kernel(9, 77)).text == codegen.emit(softmax_kernel(9, 77)).text


def test_module_says_what_it_computes_and_runs_alone() -> None:
    text = codegen.emit(softmax_kernel(9, 77)).text
    assert '__name__ == "__main__"' in text
    compile(text, "softmax.py", "exec")
