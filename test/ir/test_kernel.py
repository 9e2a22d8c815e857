"""Kernels: their text, their digest, and what they mean."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from expecttest import TestCase

from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Index, Var
from dicp.ir.interpret_kernel import run_kernel
from dicp.ir.kernel import Axis, Kernel, Param, Reduce, Scan, Statement, Store, canonical, expressions, show

F32, I64 = torch.float32, torch.int64


def load(name: str, at: Index, dtype: torch.dtype = F32) -> Expr:
    return Expr("load", (name, at), dtype)


def ref(name: str, dtype: torch.dtype = F32) -> Expr:
    return Expr("ref", (name,), dtype)


def kernel(
    axes: tuple[Axis, ...],
    *body: Statement,
    sizes: tuple[Var, ...] = (),
    dtypes: dict[str, torch.dtype] | None = None,
    name: str = "k",
) -> Kernel:
    """Parameters in order of appearance; float32 unless `dtypes` says otherwise."""
    roots = [s.value for s in body] + [Expr("index", (s.index,), I64) for s in body if isinstance(s, Store)]
    loads = [e.args[0] for e in ex.walk(*roots) if e.op == "load"]
    stores = [s.buffer for s in body if isinstance(s, Store)]
    params = tuple(
        Param(n, (dtypes or {}).get(n, F32), n in stores, n in loads)
        for n in dict.fromkeys([*loads, *stores])
    )
    return Kernel(name, axes, params, sizes, body)


def softmax(
    row: str = "i",
    column: str = "j",
    x: str = "x",
    out: str = "out",
    best: str = "top",
    total: str = "sum",
    size: Index = 5,
    name: str = "softmax",
) -> Kernel:
    a, b = Var(row, 3), Var(column, size)
    at = ix.of(a) * size + ix.of(b)
    value = ex.unary("exp", load(x, at) - ref(best))
    sizes = tuple(v for v in ix.atoms(size) if isinstance(v, Var))
    return kernel(
        (Axis(a), Axis(b, reduced=True)),
        Reduce((best,), "max", load(x, at)),
        Reduce((total,), "sum", value),
        Store(out, at, value / ref(total)),
        sizes=sizes,
        name=name,
    )


class TestText(TestCase):
    def test_softmax(self) -> None:
        self.assertExpectedInline(
            show(softmax()),
            """\
kernel softmax(x: f32, out: f32*)
  for i < 3, j < 5 reduced
  v0: f32 = x[5*i + j]
  top = reduce max v0
  v1: f32 = sub(v0, top)
  v2: f32 = exp(v1)
  sum = reduce sum v2
  v3: f32 = div(v2, sum)
  out[5*i + j] = v3""",
        )

    def test_symbolic_sizes_scan_and_update(self) -> None:
        n = Var("s0", None, 2)
        i, j = Var("i", ix.of(n)), Var("j", 4)
        at = 4 * ix.of(i) + ix.of(j)
        k = kernel(
            (Axis(j), Axis(i, reduced=True, serial=True)),
            Scan(("best", "place"), "argmax", load("x", at)),
            Store("at", at, ref("place", I64)),
            Store("out", ix.of(j), ref("best") * 2.0, "max", unique=False),
            sizes=(n,),
            dtypes={"at": I64},
        )
        self.assertExpectedInline(
            show(k),
            """\
kernel k(x: f32, at: i64*, out: f32*) sizes s0
  for j < 4, i < s0 reduced serial
  v0: f32 = x[4*i + j]
  best, place = scan argmax v0
  at[4*i + j] = place
  v1: f32 = mul(best, 2.0:f32)
  out[j] max= v1  (duplicates)""",
        )

    def test_canonical_names(self) -> None:
        self.assertExpectedInline(
            show(canonical(softmax(size=ix.of(Var("s77", None, 2))))),
            """\
kernel k(b0: f32, b1: f32*) sizes n0
  for i0 < 3, i1 < n0 reduced
  v0: f32 = b0[i0*n0 + i1]
  r0 = reduce max v0
  v1: f32 = sub(v0, r0)
  v2: f32 = exp(v1)
  r1 = reduce sum v2
  v3: f32 = div(v2, r1)
  b1[i0*n0 + i1] = v3""",
        )


def test_digest_is_indifferent_to_names_and_notes() -> None:
    k = softmax()
    others = [
        softmax("row", "col"),
        softmax(x="weights", out="y"),
        softmax(best="a", total="b"),
        softmax(name="other"),
        dataclasses.replace(k, origins=("model.py:3",)),
        dataclasses.replace(k, body=tuple(dataclasses.replace(s, note="a line") for s in k.body)),
    ]
    elsewhere = softmax()
    for e in (e for s in elsewhere.body for e in expressions(s)):
        e.note = "exp.default    model.py:4  y = x.exp()"
    assert {o.digest for o in [*others, elsewhere]} == {k.digest}
    named = [softmax(size=ix.of(Var(n, None, 2))) for n in ("s0", "s12")]
    assert named[0].digest == named[1].digest != k.digest


def test_digest_is_indifferent_to_names_that_sort_otherwise() -> None:
    """Names decide the order of terms in printed polynomials: not in the digest."""
    assert softmax("a", "b").digest == softmax("z", "b").digest == softmax("i10", "i2").digest


@pytest.mark.parametrize(
    "change", ["size", "kind", "value", "index", "mode", "dtype", "reduced", "serial", "low"]
)
def test_digest_sees_what_changes_the_code(change: str) -> None:
    k = softmax(size=ix.of(Var("s0", None, 2)))
    first, rest, last = k.body[0], k.body[1:-1], k.body[-1]
    other = {
        "size": softmax(size=7),
        "kind": dataclasses.replace(k, body=(dataclasses.replace(first, kind="min"), *rest, last)),
        "value": dataclasses.replace(
            k, body=(*k.body[:-1], dataclasses.replace(last, value=last.value * 2.0))
        ),
        "index": dataclasses.replace(k, body=(*k.body[:-1], dataclasses.replace(last, index=last.index + 1))),
        "mode": dataclasses.replace(k, body=(*k.body[:-1], dataclasses.replace(last, mode="add"))),
        "dtype": dataclasses.replace(
            k, params=(k.params[0], dataclasses.replace(k.params[1], dtype=torch.bfloat16))
        ),
        "reduced": dataclasses.replace(k, axes=(k.axes[0], dataclasses.replace(k.axes[1], reduced=False))),
        "serial": dataclasses.replace(k, axes=(k.axes[0], dataclasses.replace(k.axes[1], serial=True))),
        "low": softmax(size=ix.of(Var("s0", None, 2)) + 1),
    }[change]
    assert other.digest != k.digest


def test_digest_tells_shared_buffers_from_different_ones() -> None:
    i = Var("i", 8)
    at = ix.of(i)
    one = kernel((Axis(i),), Store("o", at, load("a", at) + load("a", at)))
    two = kernel((Axis(i),), Store("o", at, load("a", at) + load("b", at)))
    assert one.digest != two.digest


# -- meaning -----------------------------------------------------------------------------------------------------------


def run(k: Kernel, **buffers: torch.Tensor) -> dict[str, torch.Tensor]:
    buffers = {name: t.clone() for name, t in buffers.items()}
    run_kernel(k, buffers)
    return buffers


I, J = Var("i", 3), Var("j", 5)
i, j = ix.of(I), ix.of(J)
ROWS = (Axis(I), Axis(J, reduced=True))
X = torch.tensor([[3.0, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, float("nan"), 9, 9]])
CLEAN = torch.nan_to_num(X)


def test_softmax_is_softmax() -> None:
    out = run(softmax(), x=CLEAN.flatten(), out=torch.zeros(15))["out"]
    torch.testing.assert_close(out.view(3, 5), CLEAN.softmax(1))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sum", CLEAN.sum(1)),
        ("prod", CLEAN.prod(1)),
        ("max", CLEAN.amax(1)),
        ("min", CLEAN.amin(1)),
        ("any", torch.tensor([True] * 3)),
        ("all", torch.tensor([True, True, False])),
        ("argmax", torch.tensor([4, 0, 3])),
        ("argmin", torch.tensor([1, 1, 2])),
    ],
)
def test_reductions(kind: str, expected: torch.Tensor) -> None:
    dtype = expected.dtype
    k = kernel(
        ROWS, Reduce(("r",), kind, load("x", 5 * i + j)), Store("o", i, ref("r", dtype)), dtypes={"o": dtype}
    )
    out = run(k, x=CLEAN.flatten(), o=torch.zeros(3, dtype=dtype))["o"]
    torch.testing.assert_close(out, expected)


def test_nan_wins_and_the_first_position_counts() -> None:
    k = kernel(
        ROWS,
        Reduce(("r",), "max", load("x", 5 * i + j)),
        Reduce(("p",), "argmax", load("x", 5 * i + j)),
        Store("o", i, ref("r")),
        Store("p", i, ref("p", I64)),
        dtypes={"p": I64},
    )
    out = run(k, x=X.flatten(), o=torch.zeros(3), p=torch.zeros(3, dtype=I64))
    assert out["o"].isnan().tolist() == [False, False, True] and out["p"].tolist() == [4, 0, 2]


def test_welford_gives_mean_and_squared_deviations() -> None:
    k = kernel(
        ROWS,
        Reduce(("m", "s"), "welford", load("x", 5 * i + j)),
        Store("a", i, ref("m")),
        Store("b", i, ref("s") / 4.0),
    )
    out = run(k, x=CLEAN.flatten() + 1000, a=torch.zeros(3), b=torch.zeros(3))
    torch.testing.assert_close(out["a"], CLEAN.mean(1) + 1000)
    torch.testing.assert_close(out["b"], CLEAN.var(1), rtol=1e-4, atol=1e-4)


def test_scan_keeps_every_prefix() -> None:
    k = kernel(ROWS, Scan(("s",), "sum", load("x", 5 * i + j)), Store("o", 5 * i + j, ref("s")))
    out = run(k, x=CLEAN.flatten(), o=torch.zeros(15))["o"]
    torch.testing.assert_close(out.view(3, 5), CLEAN.cumsum(1))


def test_loads_see_memory_as_it_was_at_the_start() -> None:
    """The second statement reads what the first one overwrites."""
    k = kernel(
        ROWS,
        Reduce(("s",), "sum", load("x", 5 * i + j)),
        Store("x", 5 * i + j, load("x", 5 * i + j) + 1.0),
        Store("o", 5 * i + j, load("x", 5 * i + j) - ref("s")),
    )
    out = run(k, x=CLEAN.flatten(), o=torch.zeros(15))
    torch.testing.assert_close(out["o"].view(3, 5), CLEAN - CLEAN.sum(1, keepdim=True))
    torch.testing.assert_close(out["x"].view(3, 5), CLEAN + 1)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("set", [4.0, 5.0, 1.0]),
        ("add", [7.0, 11.0, 1.0]),
        ("mul", [8.0, 30.0, 1.0]),
        ("max", [4.0, 5.0, 1.0]),
        ("min", [1.0, 1.0, 1.0]),
    ],
)
def test_updates_of_one_element_combine(mode: str, expected: list[float]) -> None:
    """Element 0 is given 2, then 4; element 1 is given 2, 3 and 5. Of two that are set, the later counts."""
    r = Var("r", 5)
    at = ix.of(ix.Opaque(load("p", ix.of(r), I64), 3))
    k = kernel(
        (Axis(r, serial=True),), Store("o", at, load("v", ix.of(r)), mode, unique=False), dtypes={"p": I64}
    )
    out = run(k, v=torch.tensor([2.0, 2, 3, 4, 5]), p=torch.tensor([0, 1, 1, 0, 1]), o=torch.ones(3))["o"]
    assert out.tolist() == expected


def test_an_update_counts_once_per_point_of_the_space() -> None:
    k = kernel((Axis(I), Axis(J, serial=True)), Store("o", i, ex.const(1.0, F32), "add", unique=False))
    assert run(k, o=torch.zeros(3))["o"].tolist() == [5.0] * 3


def test_symbolic_sizes_are_given_per_run() -> None:
    n = Var("s0", None, 1)
    r = Var("r", ix.of(n))
    k = kernel(
        (Axis(r, reduced=True),),
        Reduce(("s",), "sum", load("x", ix.of(r))),
        Store("o", 0, ref("s")),
        sizes=(n,),
    )
    for size in (1, 4, 9):
        out = torch.zeros(1)
        run_kernel(k, {"x": torch.arange(9.0), "o": out}, {"s0": size})
        assert out.item() == sum(range(size))


def test_low_precision_is_rounded_where_it_is_stored() -> None:
    k = kernel(
        (Axis(I),),
        Store("o", i, load("x", i) * 1.01 * 1.01),
        dtypes={"x": torch.bfloat16, "o": torch.bfloat16},
    )
    x = torch.tensor([1.0, 2, 3], dtype=torch.bfloat16)
    out = run(k, x=x, o=torch.zeros(3, dtype=torch.bfloat16))["o"]
    assert torch.equal(out, (x.float() * 1.01 * 1.01).bfloat16())
    assert not torch.equal(out, x * 1.01 * 1.01)


def test_failed_index_check_raises() -> None:
    checked = Expr("check", (load("p", i, I64), ex.const(5, I64), 1, 0), I64)
    k = kernel((Axis(I),), Store("o", i, load("t", ix.of(ix.Opaque(checked, 5)))))
    data = {"t": torch.arange(5.0), "o": torch.zeros(3)}
    assert run(k, **data, p=torch.tensor([4, -1, 0]))["o"].tolist() == [4.0, 4.0, 0.0]
    with pytest.raises(IndexError):
        run(k, **data, p=torch.tensor([4, 5, 0]))
