"""Fusion: what shares a kernel and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from lowered import Kernels, compiled, interpret, names, program_of, text, traced

from dicp.ir.kernel import Reduce, Scan, Store
from dicp.schedule import fuse
from dicp.schedule.memory import touched
from dicp.vendor.base import Claim, Machine

LIBRARY = Kernels({"mm": Claim("mm", lambda writer, call: [], out=True)})


class TestText(TestCase):
    maxDiff = None

    def test_softmax_is_one_kernel_of_three_passes(self) -> None:
        self.assertExpectedInline(
            text(compiled(lambda x: x.softmax(1), (4, 8))),
            """\
kernel softmax(arg0_1: f32, t0: f32*)
  for i0 < 4, i1 < 8 reduced
  v0: f32 = arg0_1[8*i0 + i1]
  t1 = reduce max v0
  v1: f32 = sub(v0, t1)
  v2: f32 = exp(v1)
  t2 = reduce sum v2
  v3: f32 = div(v2, t2)
  t0[8*i0 + i1] = v3
""",
        )

    def test_two_reductions_share_a_pass(self) -> None:
        self.assertExpectedInline(
            text(compiled(lambda x: (x.sum(1), (x * x).amax(1)), (4, 8))),
            """\
kernel sum_amax(arg0_1: f32, t0: f32*, t1: f32*)
  for i0 < 4, i1 < 8 reduced
  v0: f32 = arg0_1[8*i0 + i1]
  t0 = reduce sum v0
  t0[i0] = t0
  v1: f32 = mul(v0, v0)
  t1 = reduce max v1
  t1[i0] = t1
""",
        )

    def test_value_read_inside_its_group_is_not_loaded_back(self) -> None:
        self.assertExpectedInline(
            text(compiled(lambda x: ((y := x.exp()), y.sum(1)), (4, 8))),
            """\
kernel exp_sum(arg0_1: f32, t0: f32*, t1: f32*)
  for i0 < 4, i1 < 8 reduced
  v0: f32 = arg0_1[8*i0 + i1]
  v1: f32 = exp(v0)
  t0[8*i0 + i1] = v1
  t1 = reduce sum v1
  t1[i0] = t1
""",
        )

    def test_group_sees_finer_axes_through_a_view(self) -> None:
        """exp runs over rows of eight, the sum over groups of four: one kernel over the finer axes."""
        p = compiled(lambda x: ((y := x.exp()), y.view(4, 2, 4).sum(2)), (4, 8))
        self.assertExpectedInline(
            text(p),
            """\
kernel exp_sum(arg0_1: f32, t0: f32*, t1: f32*)
  for i0 < 8, i1 < 4 reduced
  v0: f32 = arg0_1[4*i0 + i1]
  v1: f32 = exp(v0)
  t0[4*i0 + i1] = v1
  t1 = reduce sum v1
  t1[i0] = t1
""",
        )

    def test_contiguous_axes_are_merged(self) -> None:
        self.assertExpectedInline(
            text(compiled(lambda x: x[:, :, :2] + 1, (2, 3, 4))),
            """\
kernel add(arg0_1: f32, t0: f32*)
  for i0 < 6, i1 < 2
  v0: f32 = arg0_1[4*i0 + i1]
  v1: f32 = add(v0, 1.0:f32)
  t0[2*i0 + i1] = v1
""",
        )

    def test_axes_are_merged_across_one_that_steps_over_them(self) -> None:
        """A weight times a scale of its rows: the scale lies along rows, and what is in a row is one axis."""
        self.assertExpectedInline(
            text(compiled(lambda w, s: w * s[:, None, None], (8, 3, 5), (8,))),
            """\
kernel mul(arg1_1: f32, arg0_1: f32, t0: f32*)
  for i0 < 8, i1 < 15
  v0: f32 = arg1_1[15*i0 + i1]
  v1: f32 = arg0_1[i0]
  v2: f32 = mul(v0, v1)
  t0[15*i0 + i1] = v2
""",
        )

    def test_axes_are_not_merged_across_one_that_steps_inside_them(self) -> None:
        """Three planes that become channels: a row of pixels stays in a cache for all three."""
        self.assertExpectedInline(
            text(compiled(lambda x: (x + 1).contiguous(memory_format=torch.channels_last), (1, 3, 6, 8))),
            """\
kernel clone(arg0_1: f32, t0: f32*)
  for i0 < 6, i1 < 3, i2 < 8
  v0: f32 = arg0_1[8*i0 + 48*i1 + i2]
  v1: f32 = add(v0, 1.0:f32)
  t0[24*i0 + i1 + 3*i2] = v1
""",
        )

    def test_axes_in_logical_order_are_merged_with_neighbours_only(self) -> None:
        """Rows are added in the order of the positions, whatever their order in memory."""

        def add(at, rows):
            return torch.zeros(10).index_put((at.permute(0, 2, 1),), rows.permute(0, 2, 1), accumulate=True)

        inputs = torch.arange(60).view(4, 3, 5) % 10, torch.randn(4, 3, 5)
        kernel = program_of(traced(add, *inputs)["inference"]).launches[-1].kernel
        assert [(a.size, a.serial) for a in kernel.axes] == [(4, True), (5, True), (3, True)]



# -- one kernel --------------------------------------------------------------------------------------------


def rms(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotary(x, c, s):
    return x * c + torch.cat([-x[..., 4:], x[..., :4]], -1) * s


ONE = {
    "softmax": (lambda x: x.softmax(1), (4, 8)),
    "masked softmax": (lambda x, m: (x * 0.3 + m).softmax(-1), (2, 4, 8), (4, 8)),
    "layer norm and residual": (
        lambda x, r, w, b: ((h := x + r), F.layer_norm(h, (8,), w, b)),
        (4, 8),
        (4, 8),
        (8,),
        (8,),
    ),
    "rms norm": (rms, (4, 8), (8,)),
    "rms norm and residual": (lambda x, r, w: ((h := x + r), rms(h, w)), (4, 8), (4, 8), (8,)),
    "log softmax": (lambda x: x.log_softmax(1), (4, 8)),
    "batch norm and relu": (
        lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, True)),
        (2, 3, 4, 4),
        (3,),
        (3,),
    ),
    "swiglu": (lambda x, y: F.silu(x) * y, (4, 8), (4, 8)),
    "gelu": (lambda x, b: F.gelu(x + b, approximate="tanh"), (4, 8), (8,)),
    "rotary": (rotary, (2, 3, 8), (3, 8), (3, 8)),
    "cross entropy's rows": (lambda x: x.logsumexp(1), (4, 8)),
    "several results": (lambda x: (x + 1, x.exp(), x * 2), (4, 8)),
    "mean and variance": (lambda x: torch.var_mean(x, 1), (4, 8)),
    "values and positions": (lambda x: x.max(1), (4, 8)),
    "embedding and position": (lambda w, p, i: w[i] + p, (9, 8), (3, 8), torch.tensor([1, 2, 3])),
    "transpose and add": (lambda x, y: x.t().contiguous() + y, (4, 8), (8, 4)),
    "columns": (lambda x: (x.exp().sum(0), x.amax(0)), (4, 8)),
    "centred and scaled": (lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), (4, 8)),
    "sgd step": (lambda p, g, m: (m.mul_(0.9).add_(g), p.sub_(m * 0.1))[2:], (40,), (40,), (40,)),
    "scan": (lambda x: x.exp().cumsum(1) * 2, (4, 8)),
    "one memory seen in equal digits": (
        lambda x: (x.view(2, 3, 4, 8).sin(), x.view(2, 3, 4, 8).transpose(1, 3) + 1),
        (24, 8),
    ),
    "one memory seen in coarser digits": (
        lambda x: (x.view(2, 3, 4, 8).sin(), x.view(6, 4, 8).permute(2, 0, 1) + 1),
        (24, 8),
    ),
    "one memory seen in finer digits": (
        lambda x: (x.view(6, 4, 8).permute(2, 0, 1) + 1, x.view(2, 3, 4, 8).sin()),
        (24, 8),
    ),
}


@pytest.mark.parametrize("name", ONE)
def test_one_kernel(name: str) -> None:
    fn, *inputs = ONE[name]
    p = compiled(fn, *inputs)
    assert len(p.items) == len(p.launches) == 1, names(p)


# -- beside each other -------------------------------------------------------------------------------------


def sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(1), y.amax(1)


def chain(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The second sum reads what a call made of the first one, so that it has to come later."""
    a = x.sum(1)
    return a, (a[:, None].expand(4, 4) @ w).sum(1)


@pytest.mark.parametrize(
    ("fn", "inputs", "launch_bytes", "count"),
    [
        (sums, ((4, 8), (4, 8)), 1 << 10, 1),
        (sums, ((4, 8), (4, 8)), 0, 2),  # a kernel more costs nothing there
        (sums, ((4, 64), (4, 64)), 1 << 10, 2),  # too much to move
        (sums, ((4, 8), (8, 4)), 1 << 10, 2),  # other iteration spaces
        (chain, ((4, 4), (4, 4)), 1 << 10, 2),
        (lambda x, y: (x + 1, y.t() * 2), ((4, 4), (4, 4)), 1 << 10, 1),
        (lambda x, y: (x.sum(1), y * 2), ((4, 8), (4, 8)), 1 << 10, 2),
    ],
)
def test_small_kernels_of_one_space(
    fn: Any, inputs: Any, launch_bytes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(threads=2, launch_bytes=launch_bytes)
    monkeypatch.setattr(Kernels, "machine", lambda self, config: machine)
    p = compiled(fn, *inputs, vendor=LIBRARY)
    assert len(p.launches) == count, names(p)
    if fn is not chain:  # the interpreter has no library
        given = [torch.randn(shape) for shape in inputs]
        for got, want in zip(interpret(p, given)[0], fn(*given), strict=True):
            torch.testing.assert_close(got, want)


def put(cache: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cache.index_copy_(1, i, y)


def keys_and_values(k: Any, v: Any, i: Any, x: Any, y: Any) -> Any:
    """A step of a decoder with its cache: what is computed for it, and put there, and computed besides."""
    put(k, i, x.cos() * x)
    put(v, i, y)
    return x.sin() * y


def read_before(k: Any, v: Any, i: Any, x: Any, y: Any) -> Any:
    """What a kernel reads of a cache, it does not write wherever an index says."""
    z = k[:, :1] * y
    put(k, i, z)
    return z


def read_after(k: Any, v: Any, i: Any, x: Any, y: Any) -> Any:
    put(k, i, x)
    return k[:, :1] * y


def twice(k: Any, v: Any, i: Any, x: Any, y: Any) -> Any:
    """The second write is the one that counts, wherever it goes."""
    put(k, i, x)
    put(k, i, y)
    return x + y


def normed(k: Any, v: Any, i: Any, x: Any, y: Any) -> Any:
    """Keys that are normalised on their way: a row is summed before any of it is written."""
    z = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    put(k, i, z)
    return z.sum(-1)


def sum_of_rows(k: Any, v: Any, i: Any, x: Any, y: Any) -> Any:
    put(k, i, x.softmax(-1).cumsum(-1))
    v[:, i] = x
    return x + 1


@pytest.mark.parametrize(
    ("fn", "launch_bytes", "count"),
    [
        (normed, 1 << 10, 1),
        (sum_of_rows, 1 << 10, 1),
        (keys_and_values, 1 << 10, 1),
        (keys_and_values, 0, 3),
        (read_before, 1 << 10, 3),  # a copy, as it is read, and back
        (read_after, 1 << 10, 2),
        (twice, 1 << 10, 4),
    ],
)
def test_writes_at_an_index(fn: Any, launch_bytes: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scatter to places that differ is in the kernel that computes it, where launching costs."""
    machine = Machine(threads=2, launch_bytes=launch_bytes)
    monkeypatch.setattr(Kernels, "machine", lambda self, config: machine)
    small = torch.randn(3, 1, 4), torch.randn(3, 1, 4)
    gm = traced(fn, torch.randn(3, 6, 4), torch.randn(3, 6, 4), torch.tensor([2]), *small)["inference"]
    p, given = program_of(gm), gm.meta["given"]
    assert len(p.launches) == count, names(p)
    results, memory = interpret(p, given)
    want = gm.forward(*(eager := [t.clone() for t in given]))
    torch.testing.assert_close(results[-1], want[-1])
    for b, t in zip(p.lowered.inputs, eager, strict=True):
        torch.testing.assert_close(memory.of(b), t.flatten())


def test_a_scatter_that_may_meet_itself_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(threads=2, launch_bytes=1 << 10)
    monkeypatch.setattr(Kernels, "machine", lambda self, config: machine)
    x, i, y = torch.randn(3, 6, 4), torch.tensor([2, 2]), torch.randn(3, 2, 4)
    p = compiled(lambda x, i, y: (x.index_add_(1, i, y), y * 2), x, i, y)
    assert len(p.launches) == 2, names(p)


# -- more than one -----------------------------------------------------------------------------------------


SEVERAL = {
    "rows and columns": (2, lambda x: (x.sum(0), x.sum(1)), (4, 8)),
    "one memory seen in other digits": (
        2,
        lambda x: (x.view(2, 6, 4).sin(), x.view(4, 3, 4).transpose(0, 1) + 1),
        (12, 4),
    ),
    "a sum and a turned copy": (2, lambda x: (x.sum((0, 2)), x.transpose(1, 2).contiguous()), (4, 8, 16)),
    "a turned copy and a sum": (2, lambda x: (x.transpose(1, 2).contiguous() * 2, x.sum((0, 2))), (4, 8, 16)),
    "a turned copy for a product, then a sum": (
        2,
        lambda x, w: ((x.transpose(1, 2).contiguous() * 2).view(-1, 8) @ w, x.sum((0, 2))),
        (4, 8, 16),
        (8, 5),
    ),
    "unrelated work": (2, lambda x, y: (x + 1, y + 1), (4, 8), (5, 9)),
    "neighbours of a dear value": (2, lambda x: (y := x.exp())[:-1] * y[1:], (9,)),
    "whole sum read by every element": (2, lambda x: x / x.sum(), (300, 400)),
    "scan along a row too long to keep": (2, lambda x: (x.exp().sin().cumsum(1) * 2).sum(0), (4, 8)),
    "scatter and what reads it": (
        2,
        lambda x, i, y: x.index_add_(0, i, y).sum(),
        (9,),
        torch.tensor([1, 1]),
        (2,),
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_kernels(name: str) -> None:
    count, fn, *inputs = SEVERAL[name]
    p = compiled(fn, *inputs)
    assert len(p.launches) >= count, names(p)


def test_long_rows_are_read_again_from_memory_not_kept() -> None:
    p = compiled(lambda x: x.softmax(1), (1, 1 << 17))
    assert all(len({type(s) for s in k.kernel.body}) <= 2 for k in p.launches) and len(p.launches) > 2


def test_cycle_is_not_formed() -> None:
    """exp and the sum around a library call that reads exp: the call lies between them."""
    p = compiled(lambda x, w: (y := x.exp()) + (y @ w), (8, 8), (8, 8), vendor=LIBRARY)
    assert names(p)[1:] == ["aten.mm.default", "add"]
    p = compiled(lambda x, w: (y := x.exp()).sum(1, keepdim=True) * (y @ w), (8, 8), (8, 8), vendor=LIBRARY)
    assert [len(k.kernel.body) for k in p.launches] == [3, 1]


def test_steps_follow_what_they_read() -> None:
    def f(x, w, v):
        a = x.exp() @ w
        b = x.sin() @ v
        return (a + b).softmax(1) + (b @ w).sum(1, keepdim=True), a * 2

    p = compiled(f, (8, 8), (8, 8), (8, 8), vendor=LIBRARY)
    known = set(p.lowered.buffers) - {b.name for i in p.items for b in touched(i)[1]}
    for item in p.items:
        assert {b.name for b in touched(item)[0]} <= known
        known |= {b.name for b in touched(item)[1]}


def test_kernels_have_bounded_arguments() -> None:
    p = compiled(lambda *xs: [x + xs[0] for x in xs], *[(16,)] * 90)
    assert len(p.launches) > 1
    assert all(len(k.buffers) <= fuse.MAX_BUFFERS + 1 for k in p.launches)


def test_unused_reduction_is_dropped() -> None:
    (launch,) = compiled(lambda x: x.max(1)[0], (4, 8)).launches
    assert [s.kind for s in launch.kernel.body if isinstance(s, Reduce)] == ["max"]


def test_results_that_nobody_reads_are_no_kernel() -> None:
    """A window too long to be unrolled: its maxima are one reduction, their positions another."""
    program = compiled(lambda x: F.max_pool2d(x, 9, 1, 4).relu(), (1, 2, 14, 14))
    assert names(program) == ["max_pool2d_with_indices_relu"]


def test_mutated_input_is_read_before_it_is_written() -> None:
    """The old value of x is read at other places than it is written: never in one kernel."""

    def f(x):
        y = x.flip(0).exp()
        x.add_(1)
        return y

    p = compiled(f, (9,))
    assert len(p.launches) == 2
    first, second = p.launches
    assert "arg0_1" in first.reads and "arg0_1" in second.writes


def test_store_to_a_mutated_input_waits_for_the_last_pass_that_loads_it() -> None:
    def f(x):
        y = x - x.mean(1, keepdim=True)
        x.add_(1)
        return y

    x = torch.randn(3, 8)
    graph = traced(f, x)["inference"]
    out, memory = interpret(program_of(graph), [x])
    torch.testing.assert_close(out[0], x - x.mean(1, keepdim=True))
    torch.testing.assert_close(memory.flat["arg0_1"].view(3, 8), x + 1)


def test_rows_of_a_norm_keep_their_dims_for_a_product() -> None:
    """The product takes leading dims as one; the residual keeps them: both in the kernel of the norm."""

    def f(x, r, w):
        h = x + r
        return h, F.layer_norm(h, (8,)).view(-1, 8) @ w

    made = compiled(f, (2, 4, 8), (2, 4, 8), (8, 8), vendor=LIBRARY)
    assert [type(i).__name__ for i in made.items] == ["Launch", "Call"]


def test_symbolic_softmax_is_one_kernel() -> None:
    assert len(compiled(lambda x: x.softmax(1), (4, 8), dynamic=True).items) == 1
    assert len(compiled(lambda x: F.layer_norm(x, x.shape[1:]), (4, 8), dynamic=True).items) == 1


def test_axes_lie_as_memory_does() -> None:
    """The axis that most accesses walk contiguously is innermost."""
    (launch,) = compiled(lambda x, y: x.t() + y, (40, 30), torch.randn(40, 30).t()).launches
    assert [a.size for a in launch.kernel.axes] == [1200]
    (launch,) = compiled(lambda x: x.t().contiguous(), (40, 30)).launches
    assert {a.size for a in launch.kernel.axes} == {40, 30}


def test_scan_axis_is_never_merged_or_moved() -> None:
    (launch,) = compiled(lambda x: x.cumsum(1), (4, 5, 6)).launches
    assert [a.size for a in launch.kernel.inner] == [5]
    assert [type(s) for s in launch.kernel.body] == [Scan, Store]


def test_equal_layers_have_one_digest() -> None:
    def f(x, w):
        for _ in range(3):
            x = torch.relu(x @ w + 1)
        return x

    p = compiled(f, (8, 8), (8, 8), vendor=LIBRARY)
    assert len(p.launches) == 3 and len({k.kernel.digest for k in p.launches}) == 1


def test_names_say_what_was_fused() -> None:
    assert names(compiled(lambda x, r: F.layer_norm(x + r, (8,)).relu(), (4, 8), (4, 8)))[0].endswith("relu")


def test_a_variable_against_a_remainder_of_another_does_not_fuse_by_it() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.reshape(x.shape[-1], -1)
        return torch.cos(x[1:].unflatten(-3, (2, -1))), torch.log_softmax(rows, 0)

    assert names(compiled(fn, (5, 8, 8, 8))) == ["log_softmax", "cos"]


def test_what_a_kernel_comes_to_wait_for_its_readers_wait_for_too() -> None:
    """The sums over x wait for those over y as soon as d joins them, and with them the product; so e, which
    reads the product, can not join the sums over y."""

    def fn(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, a = y.sum(1), x.sum(1)
        c = a.view(1, 8) @ w
        d = (x * b[:, None]).amax(1)
        return d, (y * c.view(8, 1)).amax(1)

    p = compiled(fn, (8, 8), (8, 8), (8, 8), vendor=LIBRARY)
    assert names(p) == ["sum", "sum_amax", "aten.mm.default", "amax"]
