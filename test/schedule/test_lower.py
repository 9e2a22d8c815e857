"""Lowering: what becomes a definition, what stays an index transform, what becomes a call."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from lowered import Kernels, compiled, names, text, threads

from dicp.errors import UnsupportedOp
from dicp.ir import index as ix
from dicp.schedule.defs import Pointwise, Reduction, Scatter
from dicp.schedule.strides import affine_window
from dicp.vendor.base import Claim, Machine

LIBRARY = Kernels({"mm": Claim("mm", lambda writer, call: [], out=True)})
ALLOCATING = Kernels({"mm": Claim("mm", lambda writer, call: [])})


class TestText(TestCase):
    maxDiff = None

    def test_elementwise_chain_is_one_expression(self) -> None:
        p = compiled(lambda x, y: torch.relu(x * y + 1), (4, 8), (8,))
        self.assertExpectedInline(
            text(p),
            """\
kernel relu(arg0_1: f32, arg1_1: f32, t0: f32*)
  for i0 < 4, i1 < 8
  v0: f32 = arg0_1[8*i0 + i1]
  v1: f32 = arg1_1[i1]
  v2: f32 = mul(v0, v1)
  v3: f32 = add(v2, 1.0:f32)
  v4: f32 = maximum(v3, 0.0:f32)
  t0[8*i0 + i1] = v4
""",
        )

    def test_views_are_index_transforms(self) -> None:
        p = compiled(lambda x: x.view(2, 2, 8).transpose(0, 1).flip(2)[:, :, 2:].unsqueeze(0) + 1, (4, 8))
        self.assertExpectedInline(
            text(p),
            """\
kernel add(arg0_1: f32, t0: f32*)
  for i0 < 4, i1 < 6
  v0: f32 = arg0_1[5 + 8*i0 + -1*i1]
  v1: f32 = add(v0, 1.0:f32)
  t0[6*i0 + i1] = v1
""",
        )

    def test_cat_is_a_choice_of_masked_loads(self) -> None:
        p = compiled(lambda x, y: torch.cat([x, y * 2], 1), (4, 3), (4, 5))
        self.assertExpectedInline(
            text(p),
            """\
kernel cat(arg1_1: f32, arg0_1: f32, t0: f32*)
  for i0 < 4, i1 < 8
  v0: i64 = [i1]
  v1: b8 = lt(v0, 3:i64)
  v2: f32 = arg1_1[3*i0 + i1]
  v3: b8 = ge(v0, 3:i64)
  v4: f32 = arg0_1[-3 + 5*i0 + i1]
  v5: f32 = mul(v4, 2.0:f32)
  v6: f32 = masked(v3, v5, 0.0:f32)
  v7: f32 = masked(v1, v2, v6)
  t0[8*i0 + i1] = v7
""",
        )

    def test_equal_pieces_are_one(self) -> None:
        """The gradient of a split of which one piece is used."""
        p = compiled(lambda x: torch.cat([*x.new_zeros(100, 4).split(1), x, x.new_ones(3, 4)]), (2, 4))
        self.assertExpectedInline(
            text(p),
            """\
kernel cat(arg0_1: f32, t0: f32*)
  for i0 < 105, i1 < 4
  v0: i64 = [i0]
  v1: b8 = lt(v0, 100:i64)
  v2: b8 = ge(v0, 100:i64)
  v3: b8 = lt(v0, 102:i64)
  v4: b8 = land(v2, v3)
  v5: f32 = arg0_1[-400 + 4*i0 + i1]
  v6: b8 = ge(v0, 102:i64)
  v7: f32 = masked(v6, 1.0:f32, 0.0:f32)
  v8: f32 = masked(v4, v5, v7)
  v9: f32 = masked(v1, 0.0:f32, v8)
  t0[4*i0 + i1] = v9
""",
        )

    def test_index_read_at_run_time_is_checked(self) -> None:
        p = compiled(lambda x, i: x[i] + 1, (9, 4), torch.tensor([1, 2, 3]))
        self.assertExpectedInline(
            text(p),
            """\
kernel add(arg1_1: i64, arg0_1: f32, t0: f32*)
  for i0 < 3, i1 < 4
  v0: i64 = arg1_1[i0]
  v1: i64 = check(v0, 9:i64, 1, 0)
  v2: f32 = arg0_1[4*<v1> + i1]
  v3: f32 = add(v2, 1.0:f32)
  t0[4*i0 + i1] = v3
""",
        )

    def test_scatter_into_a_mutated_input_is_in_place(self) -> None:
        def update(cache, k, at):
            cache.index_copy_(1, at, k)

        p = compiled(update, (2, 6, 4), (2, 1, 4), torch.tensor([3]))
        self.assertExpectedInline(
            text(p),
            """\
kernel index_copy(arg2_1: f32, arg1_1: i64, t0: f32*)
  for i0 < 2, i1 < 4
  v0: f32 = arg2_1[4*i0 + i1]
  v1: i64 = arg1_1[0]
  v2: i64 = check(v1, 6:i64, 0, 0)
  t0[4*<v2> + 24*i0 + i1] = v0
""",
        )
        assert p.plan.find(p.launches[0].buffers[-1].name) == "arg0_1"

    def test_scatter_keeps_what_others_read_of_its_base(self) -> None:
        def update(cache, k, at):
            old = cache.sum(1)
            cache.index_copy_(1, at, k)
            return old

        p = compiled(update, (2, 6, 4), (2, 1, 4), torch.tensor([3]))
        self.assertExpectedInline(
            "\n".join(names(p)),
            """\
sum_index_copy
index_copy
copy_""",
        )

    def test_scatter_into_what_a_call_made_for_it_alone_is_in_place(self) -> None:
        def f(x, i, y):
            return (x @ x).index_add(0, i, y).index_add(0, i, y * 2)

        p = compiled(f, (4, 4), torch.tensor([1, 1, 2]), (3, 4), vendor=LIBRARY)
        self.assertExpectedInline("\n".join(names(p)), """\
aten.mm.default
index_add
index_add""")
        (returned,) = p.lowered.outputs
        assert p.plan.find(returned.buffer.name) == p.library_calls[0].outputs[0].name

    def test_scatter_keeps_what_others_read_of_a_call(self) -> None:
        def read_twice(x, i, y):
            z = x @ x
            return z.index_add(0, i, y), z.sin()

        def read_by_itself(x, i, y):
            z = x @ x
            return z.index_add(0, i, z[:3])

        def through_a_view(x, i, y):
            return (x @ x).t().index_add(0, i, y)

        for f in (read_twice, read_by_itself, through_a_view):
            p = compiled(f, (4, 4), torch.tensor([1, 1, 2]), (3, 4), vendor=LIBRARY)
            made = p.library_calls[0].outputs[0].name
            assert made not in {p.plan.find(d.base.name) for d in p.lowered.defs if isinstance(d, Scatter)}, f

    def test_bf16_is_computed_in_float32_and_rounded_by_the_store(self) -> None:
        p = compiled(lambda x: x * x + 1, torch.randn(8).bfloat16())
        self.assertExpectedInline(
            text(p),
            """\
kernel add(arg0_1: bf16, t0: bf16*)
  for i0 < 8
  v0: f32 = arg0_1[i0]
  v1: f32 = mul(v0, v0)
  v2: f32 = add(v1, 1.0:f32)
  t0[i0] = v2
""",
        )

    def test_eager_numerics_round_every_result(self) -> None:
        p = compiled(lambda x: x * x + 1, torch.randn(8).bfloat16(), numerics="eager")
        self.assertExpectedInline(
            text(p),
            """\
kernel add(arg0_1: bf16, t0: bf16*)
  for i0 < 8
  v0: f32 = arg0_1[i0]
  v1: f32 = mul(v0, v0)
  v2: f32 = round(v1, torch.bfloat16)
  v3: f32 = add(v2, 1.0:f32)
  t0[i0] = v3
""",
        )

    def test_eager_numerics_compute_nothing_twice(self) -> None:
        def f(x):
            h = x.exp().sin()
            return h.sum(0), h[:, :3] * 2

        assert text(compiled(f, (8, 6), numerics="eager")).count("exp(") == 1

    def test_size_that_a_window_leaves_is_a_symbol(self) -> None:
        """1 + (n - 1) // 2: positions that are taken apart by it can be put together again."""

        def f(x):
            y = x[:, ::2] * 2
            return y.reshape(-1).exp().reshape(y.shape)

        p = compiled(f, torch.randn(4, 9), dynamic=True)
        m, n = (str(size) for size in p.lowered.inputs[-1].shape)
        self.assertExpectedInline(
            text(p).replace(m, "m").replace(n, "n"),
            """\
kernel view(arg2_1: f32, t0: f32*) sizes h0, n, m
  for i0 < m, i1 < h0
  v0: f32 = arg2_1[i0*n + 2*i1]
  v1: f32 = mul(v0, 2.0:f32)
  v2: f32 = exp(v1)
  t0[h0*i0 + i1] = v2
""",
        )

    def test_symbolic_sizes_are_parameters(self) -> None:
        p = compiled(lambda x: x.sum(1), (4, 8), dynamic=True)
        symbols = sorted(v.name for v in p.launches[0].kernel.sizes)
        shown = text(p).replace(symbols[0], "n").replace(symbols[1], "m")
        self.assertExpectedInline(
            shown,
            """\
kernel sum(arg2_1: f32, t0: f32*) sizes n, m
  for i0 < m, i1 < n reduced
  v0: f32 = arg2_1[i0*n + i1]
  t0 = reduce sum v0
  t0[i0] = t0
""",
        )


# -- recompute or keep -------------------------------------------------------------------------------------


def test_views_cost_no_kernel() -> None:
    p = compiled(lambda x: x.view(2, 16).t()[3:].unsqueeze(0), (4, 8))
    assert not p.items and p.lowered.defs == []


def test_cheap_value_is_recomputed_by_each_reader() -> None:
    p = compiled(lambda x: (y := x + 1)[:-1] * y[1:], (9,))
    assert names(p) == ["mul"]


def test_dear_value_read_at_two_places_is_kept() -> None:
    p = compiled(lambda x: (y := x.exp())[:-1] * y[1:], (9,))
    assert names(p) == ["exp", "mul"]


def test_an_image_that_is_overwritten_by_its_own_parts_is_written_once() -> None:
    """Each margin is a `slice_scatter` that reads the last one's result at two places."""
    for x in (torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8).bfloat16()):
        p = compiled(lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"), x)
        assert names(p) == ["slice_scatter"]


def test_what_is_read_at_many_places_is_not_taken_apart_at_each() -> None:
    def blurred(x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x, (1, 1, 1, 1), mode="circular")
        return sum(x[..., i : 8 + i, k : 8 + k] for i in range(3) for k in range(3))

    assert names(compiled(blurred, (2, 4, 8, 8))) == ["slice_scatter", "add"]


def test_dear_value_that_is_broadcast_is_computed_once() -> None:
    p = compiled(lambda x, y: x.exp().sin()[:, None] * y, (4,), (4, 8))
    assert names(p) == ["sin", "mul"]


def test_cheap_value_that_is_broadcast_is_recomputed() -> None:
    p = compiled(lambda x, y: (x + 1)[:, None] * y, (4,), (4, 8))
    assert names(p) == ["mul"]


def test_what_is_looked_up_for_many_is_looked_up_once() -> None:
    """A table of position biases, say: one for all sequences."""

    def f(x, t, i):
        return x + t[i].t()

    table, positions = torch.randn(9, 3), torch.randint(0, 9, (5,))
    assert names(compiled(f, (8, 3, 5), table, positions)) == ["index", "add"]
    assert names(compiled(f, (7, 3, 5), table, positions)) == ["add"]


class Launching(Kernels):
    """Of a device on which each kernel more takes time."""

    def machine(self, config: Any) -> Machine:
        return replace(super().machine(config), launch_bytes=1 << 20)


def kept(p: Any) -> list[tuple[Any, ...]]:
    """Shapes of what is written between kernels."""
    return [b.shape for d in p.lowered.defs for b in d.outputs if b.kind == "temp"]


def test_a_value_is_kept_along_the_dims_on_which_it_depends() -> None:
    """Where an image is sampled is the same in all its channels."""

    def f(x, grid):
        at = grid[:, None].expand(2, 3, 5)
        return x * (at.sin() + at.cos())

    assert set(kept(compiled(f, (2, 3, 5), (2, 5)))) == {(2, 1, 5)}
    assert (2, 1, 5) not in kept(compiled(f, (2, 3, 5), (2, 5), vendor=Launching()))


def test_positions_that_many_read_are_a_table() -> None:
    def f(x):
        at = (torch.arange(20) * 0.3).long()
        return x[:, at]

    def exact(x):
        return x[:, (torch.arange(20) * 0.5).long()]

    assert kept(compiled(exact, (9, 10))) == []  # those are i // 2
    assert kept(compiled(f, (9, 10))) == [(20,)]
    assert kept(compiled(f, (2, 10))) == []  # as dear to look up as to make
    assert kept(compiled(f, (9, 10), vendor=Launching())) == []


def test_images_that_are_enlarged_are_written_as_they_lie() -> None:
    """By channel, row and column, whose parts i // 2 are read."""
    p = compiled(lambda x: torch.nn.functional.interpolate(x, scale_factor=2.0, mode="nearest"), (1, 8, 5, 6))
    assert [[a.size for a in launch.kernel.axes] for launch in p.launches] == [[8, 10, 12]]


def test_what_is_scattered_into_lies_along_what_is_read() -> None:
    """The gradient of channels-last images that are looked up by pixel."""

    def f(g, rows):
        put = torch.ops.aten.index_put.default
        return put(torch.zeros(2, 16, 5, 7), [None, None, rows], g, True).relu()

    g = torch.randn(2, 16, 9, 7).contiguous(memory_format=torch.channels_last)
    rows = torch.randint(0, 5, (9,))
    scatters = [d for d in compiled(f, g, rows).lowered.defs if isinstance(d, Scatter)]
    assert [d.base.strides for d in scatters] == [(560, 1, 112, 16)]
    scatters = [d for d in compiled(f, g.contiguous(), rows).lowered.defs if isinstance(d, Scatter)]
    assert [d.base.strides for d in scatters] == [(560, 35, 7, 1)]


def test_additions_into_zeros_go_into_one_buffer() -> None:
    def f(x, i, j):
        return (x.new_zeros(5, 4).index_put((i,), x, True) + x.new_zeros(5, 4).index_put((j,), x, True)).relu()

    p = compiled(f, (3, 4), torch.tensor([0, 1, 1]), torch.tensor([4, 1, 0]))
    assert kept(p) == [(5, 4)]


def test_long_expression_is_cut() -> None:
    """Reads beyond MAX_LOADS go through memory or registers of a kernel: no expression grows
    without limit."""
    inputs = [(7,)] * 40
    p = compiled(lambda *xs: sum(x * (k + 1) for k, x in enumerate(xs)), *inputs)
    assert 1 < sum(isinstance(d, Pointwise) for d in p.lowered.defs) < 8


def test_shared_computation_grows_linearly() -> None:
    """x = x * x + x[::-1], 40 times over: nothing is inlined twice without bound."""

    def f(x):
        for _ in range(40):
            x = (x * x.flip(0) + x).tanh()
        return x

    p = compiled(f, (8,))
    assert len(p.lowered.defs) <= 41
    assert all(len(k.kernel.body) < 100 for k in p.launches)


# -- calls -------------------------------------------------------------------------------------------------


def test_claimed_op_becomes_a_library_call_on_planned_memory() -> None:
    p = compiled(lambda x, w: (x @ w).relu(), (4, 8), (8, 8), vendor=LIBRARY)
    assert names(p) == ["aten.mm.default", "relu"]
    assert p.library_calls[0].outputs[0].kind == "temp"
    p = compiled(lambda x, w: (x @ w).relu(), (4, 8), (8, 8), vendor=ALLOCATING)
    assert p.library_calls[0].outputs[0].kind == "library"


def test_operands_of_calls_are_views_where_they_can_be() -> None:
    p = compiled(lambda x, w: x[1:, :4] @ w.t(), (5, 8), (6, 4), vendor=LIBRARY)
    assert names(p) == ["aten.mm.default"]
    a, b = p.library_calls[0].args
    assert (a.shape, a.strides, a.offset) == ((4, 4), (8, 1), 8)
    assert (b.shape, b.strides, b.offset) == ((4, 6), (1, 4), 0)


def test_unclaimed_op_becomes_a_counted_extern() -> None:
    p = compiled(lambda x: torch.linalg.svdvals(x) + 1, (4, 4))
    assert names(p) == ["aten._linalg_svd.default", "add"] and len(p.externs) == 1


def test_strict_refuses_externs() -> None:
    with pytest.raises(UnsupportedOp, match="linalg_svd"):
        compiled(lambda x: torch.linalg.svdvals(x), (4, 4), strict=True)


def test_matmul_that_nobody_claims_is_an_extern_too() -> None:
    assert names(compiled(lambda x, w: x @ w, (4, 8), (8, 8))) == ["aten.mm.default"]


# -- reductions --------------------------------------------------------------------------------------------


def reductions(fn, *inputs, **options) -> list[Reduction]:
    return [d for d in compiled(fn, *inputs, **options).lowered.defs if isinstance(d, Reduction)]


def sizes(d: Reduction) -> tuple[list[int], list[int]]:
    return [v.size for v in d.vars], [v.size for v in d.rvars]


def test_long_reduction_is_split_for_all_threads() -> None:
    first, second = reductions(lambda x: x.sum(), (65536,))
    assert sizes(first) == ([16], [4096]) and sizes(second) == ([], [16])


def test_column_reduction_is_split_along_its_outer_dim() -> None:
    first, second = reductions(lambda x: x.sum(0), (8192, 24))
    assert sizes(first) == ([16, 24], [512]) and sizes(second) == ([24], [16])


def test_split_keeps_leading_dims_as_results_of_the_first_part() -> None:
    first, second = reductions(lambda x: x.sum((0, 2, 3)), (8, 6, 64, 64))
    kept, summed = sizes(first)
    assert kept[0] == 6 and 8 in kept and summed[-1] == 64
    assert math.prod(kept) * math.prod(summed) == 8 * 6 * 64 * 64
    assert sizes(second) == ([6], [n for n in kept if n != 6])


def test_parts_lie_as_what_they_are_of() -> None:
    """Side by side where a result's pixels are, so that the first part reads whole lines; else results do."""
    last = lambda x: x.contiguous(memory_format=torch.channels_last)  # noqa: E731 (as the others)
    groups = lambda x: torch.var_mean(last(x).view(1, 32, 8, 1024), (2, 3))  # noqa: E731
    first, *_ = reductions(groups, last(torch.randn(1, 256, 32, 32)))
    assert sizes(first) == ([32, 8], [1024])
    first, *_ = reductions(lambda x: x.sum((0, 1)), (64, 128, 24))
    assert sizes(first) == ([64, 24], [128])


def test_welford_is_split_into_means_and_deviations() -> None:
    assert [d.kind for d in reductions(lambda x: torch.var_mean(x), (65536,))] == [
        "welford",
        "welford",
        "sum",
    ]


@pytest.mark.parametrize("shape", [(64,), (4, 70000), (4096,)])
def test_reduction_is_left_whole_where_splitting_brings_nothing(shape: tuple[int, ...]) -> None:
    """Short, or with rows enough for every thread."""
    rows = (8, *shape) if len(shape) == 2 else shape
    assert len(reductions(lambda x: x.sum(-1), rows)) == 1


def test_one_thread_splits_nothing() -> None:
    with threads(1):
        assert len(reductions(lambda x: x.sum(), (65536,))) == 1


def test_the_vendor_says_what_there_is_to_occupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "machine", lambda self, config: Machine(threads=8, cache_bytes=1 << 12))
    first, second = reductions(lambda x: x.sum(), (65536,))
    assert sizes(first) == ([64], [1024]) and sizes(second) == ([], [64])
    rows = compiled(lambda x: x - x.sum(1, keepdim=True), (64, 1024)).launches
    assert len(rows) == 1  # 4 KiB: a row may be read again
    assert len(compiled(lambda x: x - x.sum(1, keepdim=True), (64, 1025)).launches) == 2
    shared = Machine(threads=8, cache_bytes=1 << 12, shared_row=2000)
    monkeypatch.setattr(Kernels, "machine", lambda self, config: shared)
    for n, kernels in ((1025, 1), (2001, 2)):
        assert len(compiled(lambda x: x - x.sum(1, keepdim=True), (64, n)).launches) == kernels
    assert len(compiled(lambda x: x - x.sum(0, keepdim=True), (1025, 64)).launches) == 2  # no row of neighbours


def test_columns_are_cut_until_there_are_enough_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of many threads: each piece of 8,192 columns is 8,192 results more to write and read. Pieces
    may be parts of a second dim."""
    many = Machine(32, lanes=64, split_columns=512, most_pieces=256, least_piece=64, most_columns=4)
    monkeypatch.setattr(Kernels, "machine", lambda self, config: many)
    for shape, parts, rows in (
        ((8192, 8192), [16], [512]),
        ((65536, 64), [256], [256]),
        ((2048, 768), [32], [64]),
        ((16, 128, 768), [16, 2], [64]),
        ((64, 40, 768), [32], [2, 40]),
    ):
        dims = list(range(len(shape) - 1))
        first, second = reductions(lambda x, dims=dims: x.sum(dims), shape)
        assert sizes(first) == ([*parts, shape[-1]], rows) and sizes(second) == ([shape[-1]], parts), shape
    assert len(reductions(lambda x: x.sum(0), (256, 8192))) == 1
    assert len(reductions(lambda x: x.sum(1), (512, 2048))) == 1  # rows are long enough as they are


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (lambda x, m, y: x - m, 0),  # no more bytes than it has: the mean stays at hand
        (lambda x, m, y: x + y, 1),
        (lambda x, m, y: (x.view(64) + y.repeat_interleave(2)[:64]).view(8, 8), 1),
        (lambda x, m, y: x.bfloat16() + y.bfloat16(), 1),
    ],
)
def test_what_is_read_from_fewer_bytes_is_recomputed(value: Any, kept: int) -> None:
    """Two readers that cannot share a kernel."""

    def fn(x: torch.Tensor, m: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = value(x, m, y)
        return v.sum(0), (v * v).amax(1)

    buffers = compiled(fn, (8, 8), (8,), (8, 8)).lowered.buffers.values()
    assert sum(b.kind == "temp" and b.numel == 64 for b in buffers) == kept


def test_what_two_readers_want_in_memory_is_written_once() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.relu()
        return y, y @ w

    assert text(compiled(fn, (4, 8), (8, 4), vendor=LIBRARY)).count("] = v") == 1


def test_a_result_among_several_keeps_its_own_order_in_memory() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.batch_norm(x.permute(0, 3, 1, 2), None, None, training=True)
        return y, y.permute(0, 2, 3, 1).reshape(-1, 8) @ w  # rows of channels: a view of y, in y's order

    p = compiled(fn, (2, 4, 4, 8), (8, 4), vendor=LIBRARY)
    assert text(p).count("] = v") == 1



def test_kernels_are_named_after_what_they_compute() -> None:
    p = compiled(lambda x, w: (x.exp() @ w).sin(), (4, 8), (8, 4), vendor=LIBRARY)
    assert [x.kernel.name for x in p.launches] == ["exp", "sin"]


def test_symbolic_extents_are_reduced_whole() -> None:
    assert len(reductions(lambda x: x.sum(), (65536,), dynamic=True)) == 1


def test_reduction_of_one_element_is_that_element() -> None:
    p = compiled(lambda x: (x[None].sum(0) + 1, x[None].argmax(0)), (9,))
    assert not any(isinstance(d, Reduction) for d in p.lowered.defs)


# -- strides -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.t() + 1,
        lambda x: (x + 1).t(),
        lambda x: x.permute(1, 0).exp(),
        lambda x: x.sum(0, True).t(),
    ],
    ids=["t", "then_t", "permute", "sum"],
)
def test_results_have_eagers_strides(fn) -> None:
    x = torch.randn(4, 8)
    (out,) = compiled(fn, x).lowered.outputs
    assert tuple(out.strides) == fn(x).stride()


def test_channels_last_goes_through() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    p = compiled(lambda x: F.relu(x) * 2, x)
    assert p.lowered.outputs[0].strides == x.stride()
    (launch,) = p.launches
    assert [a.size for a in launch.kernel.axes] == [120]


@pytest.mark.parametrize(
    ("strides", "shape"),
    [((105, 1, 21, 3), (1, 3, 5, 7)), ((105, 35, 7, 1), (1, 3, 5, 7)), ((8, 8, 1), (4, 1, 8))],
)
def test_the_stride_of_a_dim_of_one_is_a_dense_tensors(strides: Any, shape: Any) -> None:
    """Also of channels-last images: libraries take a batch of one for such by this stride."""
    idx = tuple(0 if n == 1 else ix.of(ix.Var(f"i{k}", n)) for k, n in enumerate(shape))
    flat = sum((i * s for i, s in zip(idx, strides, strict=True)), 5)
    assert affine_window(flat, idx, shape) == (strides, 5)


def test_scatter_targets_known_to_differ_are_marked() -> None:
    p = compiled(lambda x, y: torch.slice_scatter(x, y, 0, 1, 3).exp(), (5, 4), (2, 4))
    assert all(d.unique for d in p.lowered.defs if isinstance(d, Scatter))
