"""Places that are found at run time: searches among boundaries, images read at a grid's places, and functions
without a primitive of the processor's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bridge.checks import check

from dicp.ir.expr import LONG, texts
from dicp.ir.kernel import show
from dicp.schedule.defs import Pointwise
from dicp.vendor.cpu_graph.codegen import emit

NAN = math.nan


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("right", [False, True])
def test_searches(count: int, right: bool) -> None:
    """Repeated boundaries, NaN among what is searched for, rows of their own and shared ones."""
    edges = torch.randint(-9, 10, (3, count)).float().sort(1)[0]
    x = torch.cat(
        [torch.randint(-11, 12, (3, 40)).float(), torch.tensor([[NAN, math.inf, -math.inf]] * 3)], 1
    )

    def search(edges: torch.Tensor, x: torch.Tensor) -> Any:
        rows = torch.searchsorted(edges, x, right=right)
        return rows, torch.bucketize(x, edges[1], right=right, out_int32=True), rows.float() * 2

    check(search, edges, x, calls=1)


def test_a_search_takes_a_step_for_each_halving() -> None:
    """Its texts too: each step reads the one before three times, once as a position."""
    edges, x = torch.randn(2, 5000).sort(1)[0], torch.randn(2, 70)
    (graph,) = check(lambda edges, x: torch.searchsorted(edges, x), edges, x, calls=1)
    (launch,) = graph.program.launches
    assert (
        emit(launch.kernel, "f", 8).count("gather(") == 12
    )  # of 13 steps, the first is one element of a row
    assert len(show(launch.kernel)) < 8000
    (search,) = (d for d in graph.program.lowered.defs if isinstance(d, Pointwise))
    assert len(search.expr.key) <= LONG and len("".join(texts(search.expr))) < 4000


@pytest.mark.one_in(2)
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_images_at_the_places_of_a_grid(mode: str, padding: str, corners: bool) -> None:
    """Inside, outside and far away, against float64."""

    def sample(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=corners)

    grid = torch.rand(2, 7, 11, 2) * 4 - 2
    grid[0, 0, 0] = torch.tensor([1e6, -1e9])
    compiled = torch.compile(sample, backend="dicp_cpu", dynamic=False)
    for order, (h, w) in ((torch.contiguous_format, (9, 13)), (torch.channels_last, (1, 5))):
        x = torch.randn(2, 5, h, w).contiguous(memory_format=order)
        y = compiled(x, grid)
        places = grid if padding == "zeros" else grid.clamp(-2, 2)  # where float64 reflects as float32 does
        exact = sample(x.double(), grid.double())
        near = (places == grid).all(-1)[:, None].expand(y.shape)
        torch.testing.assert_close(y[near].double(), exact[near], rtol=1e-4, atol=1e-4)
        assert y.stride() == sample(x, grid).stride()


def test_a_place_outside_of_the_image_is_not_read() -> None:
    """Not even with a weight of zero: infinity there would be NaN."""
    x = torch.full((1, 1, 4, 4), math.inf)
    grid = torch.full((1, 3, 40, 2), 5.0)
    check(lambda x, grid: F.grid_sample(x, grid, align_corners=False), x, grid, calls=1)


def test_images_of_sizes_that_vary() -> None:
    compiled = torch.compile(
        lambda x, g: F.grid_sample(x, g, align_corners=False), backend="dicp_cpu", dynamic=True
    )
    for n in (5, 8, 21):
        x, grid = torch.randn(2, 3, n, n + 2), torch.rand(2, n + 1, 9, 2) * 3 - 1.5
        torch.testing.assert_close(compiled(x, grid), F.grid_sample(x, grid, align_corners=False))


@pytest.mark.parametrize(
    "shape, size", [((2, 3, 11, 13), (5, 4)), ((1, 2, 4, 5), (7, 5)), ((2, 3, 12, 12), (4, 6))]
)
def test_gradients_of_windows_that_differ(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(*shape[:2], *size)
    pool = torch.compile(lambda x: F.adaptive_avg_pool2d(x, size), backend="dicp_cpu", dynamic=False)
    (got,) = torch.autograd.grad(pool(x), x, weight)
    (want,) = torch.autograd.grad(F.adaptive_avg_pool2d(x, size), x, weight)
    torch.testing.assert_close(got, want)


def test_the_inverse_of_erf() -> None:
    """3 units in the last place of float32, 4 of float64; both ends, zeros with their signs, and outside."""
    compiled = torch.compile(torch.erfinv, backend="dicp_cpu", dynamic=True)
    ends = torch.tensor([0.0, 1.0, 1.5, NAN, math.inf])
    x = torch.cat([torch.rand(5000), 1 - torch.logspace(-7.2, 0, 3000), torch.logspace(-30, -1, 2000), ends])
    x = torch.cat([x, -x])
    exact = x.double().erfinv()
    known = exact.isfinite()
    unit = torch.ldexp(torch.tensor(1.0), torch.frexp(exact.float())[1] - 24).double()
    got = compiled(x)
    assert ((got.double() - exact).abs() / unit)[known].max() <= 3
    assert torch.equal(got.signbit()[known], exact.signbit()[known])
    torch.testing.assert_close(got[~known], exact[~known].float(), equal_nan=True)
    wide = torch.cat(
        [torch.rand(5000, dtype=torch.float64), 1 - torch.logspace(-16, 0, 3000, dtype=torch.float64)]
    )
    torch.testing.assert_close(compiled(wide), wide.erfinv(), rtol=1e-15, atol=0)


@pytest.mark.parametrize("whole", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (30,)])
def test_floats_of_integers_of_floats(shape: tuple[int, ...], dtype: torch.dtype, whole: torch.dtype) -> None:
    """Have no zeros below zero, and are what an integer holds of what is beyond it."""
    x = torch.tensor([-0.3, -0.0, 0.3, 1e30, NAN, -7.5]).repeat(5)[: math.prod(shape)].reshape(shape).to(dtype)
    if whole == torch.int32:
        x = x.nan_to_num(0).clamp(-9, 9)  # beyond, eager's vectors and scalars differ
    y = torch.compile(lambda x: x.to(whole).to(dtype), backend="dicp_cpu", dynamic=False)(x)
    exact = x.to(whole).to(dtype)
    assert torch.equal(y, exact) and torch.equal(y.signbit(), exact.signbit())


def test_what_eager_refuses_is_refused() -> None:
    def search(edges: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(edges, x, side="middle")

    def sample(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, align_corners=False)

    grid = torch.rand(2, 3, 9, 2)
    for fn, args in (
        (search, (torch.arange(6.0), torch.randn(5))),
        (sample, (torch.randn(2, 2, 4, 5), grid.double())),
        (sample, (torch.randn(2, 2, 0, 5), grid)),
    ):
        with pytest.raises(RuntimeError, match="side can only|expected scalar type|non-empty spatial"):
            torch.compile(fn, backend="dicp_cpu", dynamic=False)(*args)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16, torch.bool]
)
def test_narrow_elements_keep_their_bits(dtype: torch.dtype) -> None:
    """Every pattern of 16 bits, NaN of any payload among them; in parts whose ends fill no vector."""
    bits = torch.arange(1 << 16).to(torch.int32).sub(1 << 15).to(torch.int16)
    x = (
        bits.view(dtype)
        if dtype.itemsize == 2
        else bits.to(torch.uint8).view(dtype)
        if dtype != torch.bool
        else bits > 0
    )
    x = x.reshape(256, 256)
    joined = torch.compile(lambda x, y: torch.cat([x, y], 1), backend="dicp_cpu", dynamic=False)
    got = joined(x, x[:, :77])
    assert torch.equal(got.view(torch.uint8), torch.cat([x, x[:, :77]], 1).view(torch.uint8))
