"""Phases: which statements of a kernel wait for the end of a pass over the reduced axes."""

from __future__ import annotations

from test_kernel import load, ref, softmax

from dicp.ir import index as ix
from dicp.ir.dependence import Dependence
from dicp.ir.index import Var
from dicp.ir.kernel import Axis, Kernel, Param, Reduce, Scan, Statement, Store
from dicp.ir.phases import is_full, phases

ROW, COLUMN = Var("i", 3), Var("j", 5)
AT, HERE = ix.of(ROW) * 5 + ix.of(COLUMN), ix.of(ROW)


def of(*body: Statement, reduced: frozenset[object] = frozenset([COLUMN])) -> list[int]:
    params = (Param("x", load("x", AT).dtype, True),)
    kernel = Kernel("k", (Axis(ROW), Axis(COLUMN, reduced=True)), params, (), body)
    dependence = Dependence()
    return phases(kernel, lambda s: is_full(s, reduced, dependence))


def test_each_reduction_waits_for_those_that_it_reads() -> None:
    kernel = softmax()
    assert phases(kernel, lambda s: True) == [0, 1, 2]
    assert phases(kernel, lambda s: True, beside=lambda s: {"top"} if s.kind == "sum" else set()) == [0, 0, 1]


def test_a_scan_is_known_at_once() -> None:
    assert of(Scan(("s",), "sum", load("x", AT)), Store("y", AT, ref("s"))) == [0, 0]


def test_nothing_is_overwritten_before_its_last_load() -> None:
    total, mean = Reduce(("t",), "sum", load("x", AT)), Reduce(("m",), "max", load("x", AT) - ref("t"))
    whole, point = Store("x", AT, load("x", AT) + 1.0), Store("x", HERE, load("y", HERE))
    assert of(total, mean, whole) == [0, 1, 1]  # at each element after its load
    assert of(total, mean, point) == [0, 1, 2]
    assert of(total, mean, Store("z", HERE, load("y", HERE))) == [0, 1, 0]


def test_positions_read_from_memory_count() -> None:
    found = Reduce(("p",), "argmax", load("x", AT))
    there = ix.of(ix.Opaque(ref("p"), 5))
    assert of(found, Store("y", there, load("z", HERE))) == [0, 1]
