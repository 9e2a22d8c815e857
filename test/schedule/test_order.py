"""The order of steps: what comes early, and that nothing comes before what it needs."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import Kernels, compiled, names

from dicp.schedule.fuse import fuse
from dicp.schedule.order import Use, in_order
from dicp.vendor.base import Claim

LIBRARY = Kernels({"mm": Claim("mm", lambda writer, call: [], out=True)})


def ordered(*steps: tuple[str, str], kept: str = "", nbytes: dict[str, int] | None = None) -> list[int]:
    """Of steps (what it reads, what it writes), each name a letter; a step depends on those that wrote what it
    reads."""
    uses = [Use(set(reads), set(writes)) for reads, writes in steps]
    before = []
    for k, use in enumerate(uses):
        mask = 0
        for earlier in range(k):
            if uses[earlier].writes & use.reads:
                mask |= 1 << earlier | before[earlier]
        before.append(mask)
    sizes = {n: 8 for use in uses for n in use.reads | use.writes if n.islower()}
    return in_order(before, uses, {**sizes, **(nbytes or {})}, set(kept))


def test_a_result_of_fewer_bytes_follows_what_it_is_made_of() -> None:
    steps = ("X", "a"), ("X", "b"), ("b", "c"), ("a", "y"), ("c", "z")
    assert ordered(*steps, kept="yz", nbytes={"y": 4, "z": 4}) == [0, 3, 1, 2, 4]


def test_one_that_gives_nothing_back_stays() -> None:
    steps = ("X", "a"), ("X", "b"), ("b", "z"), ("a", "y")
    assert ordered(*steps, kept="yz") == [0, 1, 2, 3], "as many bytes as before"
    assert ordered(("X", "a"), ("X", "b"), ("X", "y"), kept="yb", nbytes={"y": 0}) == [0, 1, 2], "inputs stay"
    assert ordered(("X", "a"), ("X", "b"), ("ab", "c"), ("a", "y"), kept="ay", nbytes={"y": 4})[-1] == 3


def test_the_last_reader_gives_memory_back() -> None:
    """Not the first: step 3 reads `a`, and step 2 does as well."""
    steps = ("X", "a"), ("X", "b"), ("ab", "c"), ("a", "y"), ("c", "z")
    assert ordered(*steps, kept="yz", nbytes={"y": 4}) == [0, 1, 2, 3, 4]


def test_what_is_not_written_to_memory_takes_none() -> None:
    """A value that only its own step reads stays in registers."""
    steps = ("X", "a"), ("X", "b"), ("b", "z"), ("ac", "cy")
    assert ordered(*steps, kept="yz", nbytes={"y": 4, "c": 100}) == [0, 3, 1, 2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.text("abcdef", max_size=3), st.text("abcdef", max_size=2)), max_size=12))
def test_every_step_comes_once_and_after_what_it_depends_on(drawn: Any) -> None:
    steps = [(reads, writes.replace("a", "")) for reads, writes in drawn]
    order = ordered(*steps)
    assert sorted(order) == list(range(len(steps)))
    for k, (reads, _) in enumerate(steps):
        for earlier in range(k):
            if set(steps[earlier][1]) & set(reads):
                assert order.index(earlier) < order.index(k)


def test_a_copy_that_a_graph_returns_is_made_where_its_source_is_read_last() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = x @ w
        return y.half(), y @ w @ w @ w

    steps = names(compiled(fn, (64, 64), (64, 64), vendor=LIBRARY))
    assert [n.removeprefix("aten.").removesuffix(".default") for n in steps] == [
        "mm",
        "mm",
        "to_copy",
        "mm",
        "mm",
    ]


def test_a_packed_weight_is_not_the_programs_to_give_back() -> None:
    def fn(x: Any, v: Any, w: Any) -> Any:
        a, b = x @ v, v @ x
        return b @ b, a @ w

    lowered = compiled(fn, (64, 64), (64, 64), (64, 64), vendor=LIBRARY).lowered
    packed = next(
        b for b in lowered.inputs if b is not None and b.name == lowered.defs[-1].args[1].buffer.name
    )
    packed.kind = "packed"
    assert fuse(lowered) == lowered.defs, "in the order of the graph"
