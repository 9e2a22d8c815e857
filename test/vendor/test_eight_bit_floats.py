"""Floats of eight bits in kernels of both vendors: conversions and moves give eager's numbers, without extern
calls. What eager refuses to compute with them is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dicp.compiler import Compiled, observe
from dicp.dynamo_bridge.backend import dicp_cpu, dicp_cuda

KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BACKENDS = {"cpu": (dicp_cpu, {}), "cuda": (dicp_cuda, {"interpret": True})}

pytestmark = [
    pytest.mark.parametrize("kind", KINDS, ids=["e4m3", "e5m2"]),
    pytest.mark.parametrize("vendor", BACKENDS),
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def compiled(vendor: str, fn: Callable[..., Any], *args: torch.Tensor) -> Any:
    backend, options = BACKENDS[vendor]
    seen: list[Compiled] = []
    with observe(seen.append):
        out = torch.compile(fn, backend=backend, options=options, fullgraph=True)(*args)
    assert [c.node.target for s in seen for c in s.program.externs] == []
    return out


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same bits; of NaN, any."""
    assert got.dtype == want.dtype and got.stride() == want.stride()
    a, b = (t.double() for t in (got, want))
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(a.signbit()[~a.isnan()], b.signbit()[~b.isnan()])


@pytest.mark.parametrize("wide", FLOATS)
def test_every_number(vendor: str, kind: torch.dtype, wide: torch.dtype) -> None:
    x = torch.arange(256).to(torch.uint8).view(kind)
    assert_same(compiled(vendor, lambda x: x.to(wide), x), x.to(wide))


@pytest.mark.parametrize("wide", FLOATS)
def test_rounding_and_overflow(vendor: str, kind: torch.dtype, wide: torch.dtype) -> None:
    """All magnitudes of bfloat16, whose ties and overflows are among them; and what lies between."""
    x = torch.arange(-(1 << 15), 1 << 15, 7).to(torch.int16).view(torch.bfloat16).to(wide)
    borders = torch.tensor([464.0, 465, 448, 480, 61440, 57344, 65536, 2**-17, -0.0]).to(wide)
    x = torch.cat([x, x * (1 + 2**-12), borders])
    assert_same(compiled(vendor, lambda x: x.to(kind), x), x.to(kind))


@pytest.mark.parametrize("whole", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_whole_numbers(vendor: str, kind: torch.dtype, whole: torch.dtype) -> None:
    """Also those of int8, which have more digits than a float of eight bits."""
    x = torch.arange(-300, 300).to(whole)
    assert_same(compiled(vendor, lambda x: x.to(kind), x), x.to(kind))
    torch._dynamo.reset()
    assert_same(compiled(vendor, lambda x: x.to(kind).float() / 3, x), x.to(kind).float() / 3)
    torch._dynamo.reset()
    y = torch.arange(-100, 100).to(kind)
    assert_same(compiled(vendor, lambda y: y.to(whole), y), y.to(whole))


ROWS = torch.tensor([3, 0, 5])
MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t().contiguous(),
    "every other column": lambda x: x[1:, ::2].clone(),
    "cat": lambda x: torch.cat([x, x[:2]]),
    "stack": lambda x: torch.stack([x, x.roll(1, 0)]),
    "padded": lambda x: torch.nn.functional.pad(x, (1, 2), value=3.3),
    "rows": lambda x: x[ROWS],
    "index_select": lambda x: x.index_select(1, ROWS),
    "embedding": lambda x: torch.nn.functional.embedding(ROWS, x),
    "repeated": lambda x: x.repeat(2, 2),
    "filled": lambda x: torch.full_like(x, 3.3),
    "other kind": lambda x: x.to(KINDS[int(x.dtype == KINDS[0])]),
    "through a kernel": lambda x: ((x.float() * 3).to(x.dtype).float() + 1).to(x.dtype),
}


@pytest.mark.parametrize("move", MOVES)
def test_moves(vendor: str, kind: torch.dtype, move: str) -> None:
    x = torch.randn(6, 37).to(kind)
    assert_same(compiled(vendor, MOVES[move], x), MOVES[move](x))


def test_what_is_rounded_on_the_way_stays_so(vendor: str, kind: torch.dtype) -> None:
    """Values that no memory sees are rounded too: that is what a quantisation is."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(1, keepdim=True) / 448
        near = (x / scale).to(kind).float() * scale
        return near, (x - near).square().sum()

    x = torch.randn(9, 130)
    for got, want in zip(compiled(vendor, fn, x), fn(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_inputs_that_are_written(vendor: str, kind: torch.dtype) -> None:
    def fn(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache[1:3] = x.to(cache.dtype)
        return cache.float().sum(1)

    x = torch.randn(2, 37)
    mine, theirs = (torch.ones(6, 37).to(kind) for _ in range(2))
    got, want = compiled(vendor, fn, mine, x), fn(theirs, x)
    assert_same(mine, theirs)
    torch.testing.assert_close(got, want)


def test_a_batch_of_any_size(vendor: str, kind: torch.dtype) -> None:
    backend, options = BACKENDS[vendor]
    fn = torch.compile(lambda x: (x * 2).to(kind).t().clone(), backend=backend, options=options, dynamic=True)
    for n in (3, 8, 50):
        x = torch.randn(n, 19)
        assert_same(fn(x), (x * 2).to(kind).t().clone())


@pytest.mark.parametrize("fn", [lambda x: x + x, lambda x: x.sum(), lambda x: x.relu()], ids=["add", "sum", "relu"])
def test_arithmetic_is_refused_as_eager_refuses_it(vendor: str, kind: torch.dtype, fn: Any) -> None:
    backend, options = BACKENDS[vendor]
    x = torch.randn(5, 7).to(kind)
    with pytest.raises(NotImplementedError):
        fn(x)
    with pytest.raises(Exception, match="not implemented for 'Float8"):
        torch.compile(fn, backend=backend, options=options)(x)
