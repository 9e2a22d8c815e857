"""Depthwise-separable convolutions in bands: against float64 under the rule of all tests (no further from it than twice
eager), what is not finite, sizes that vary, and which convolutions they serve."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph.claims import images
from dicp.vendor.cpu_graph.microkernels import available

DTYPES = [d for d in (torch.float32, torch.bfloat16) if available(d)]
pytestmark = pytest.mark.skipif(not DTYPES, reason="no micro-kernels here")
OWN = "separable: bands"


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(5)
    yield


class Block(nn.Module):
    """An inverted residual, or the first convolutions of a network."""

    def __init__(
        self, channels: int, hidden: int, results: int, first: dict[str, Any], window: Any, bias: bool = True, act: Any = nn.ReLU6
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, hidden, **{"kernel_size": 1, "bias": bias, **first})
        self.middle = nn.Conv2d(hidden, hidden, *window, groups=hidden, bias=bias)
        self.last = nn.Conv2d(hidden, results, 1, bias=bias)
        self.act = act()

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        y = self.last(self.act(self.middle(self.act(self.first(x)))))
        return y if other is None else y + other


STEM = {"kernel_size": 3, "stride": 2, "padding": 1}
# x: batch, channels, height, width; hidden, results; the first convolution; window, stride, padding of the second
CASES: dict[str, tuple[tuple[int, int, int, int], int, int, dict[str, Any], tuple[Any, ...]]] = {
    "one chunk": ((2, 8, 10, 9), 32, 8, {}, (3, 1, 1)),
    "chunks, the last of them narrow": ((2, 24, 14, 14), 144, 24, {}, (3, 1, 1)),
    "stride": ((2, 16, 13, 17), 96, 24, {}, (3, 2, 1)),
    "stride that leaves columns": ((1, 16, 12, 12), 64, 20, {}, (3, 2, 0)),
    "7x7 larger than the image": ((3, 8, 5, 4), 48, 70, {}, (7, 1, 3)),
    "5x5, odd channels": ((2, 10, 15, 11), 66, 33, {}, (5, 2, 2)),
    "even window": ((1, 8, 11, 12), 40, 8, {}, (2, 1, 0)),
    "more bands than one": ((1, 16, 70, 61), 96, 16, {}, (3, 1, 1)),
    "a row in parts": ((1, 8, 12, 130), 32, 8, {}, (3, 1, 1)),
    "more images than one to a band": ((9, 16, 7, 7), 96, 24, {}, (3, 1, 1)),
    "first ones": ((2, 3, 30, 26), 32, 16, STEM, (3, 1, 1)),
    "first ones, another window": ((2, 4, 19, 15), 24, 12, {"kernel_size": (2, 3), "padding": (0, 2)}, (3, 1, 1)),
    "first ones, windows apart": ((2, 3, 20, 20), 16, 16, {"kernel_size": 1, "stride": 2}, (3, 1, 1)),
    "padding of pixels": ((2, 8, 9, 9), 32, 16, {"padding": 1}, (3, 1, 1)),
}


def compiled(fn: Any, *args: Any, **how: Any) -> tuple[Any, list[str]]:
    """The function, and the names of the calls in what its first call compiled."""
    seen: list[Compiled] = []
    run = torch.compile(fn, backend="dicp_cpu", **how)
    with observe(seen.append):
        run(*args)
    return run, [c.claim.name for s in seen for c in s.program.library_calls]


def block_of(case: str, **how: Any) -> tuple[Block, torch.Tensor]:
    shape, hidden, results, first, window = CASES[case]
    return Block(shape[1], hidden, results, first, window, **how), torch.randn(shape)


def close(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    unit = 4 * torch.finfo(got.dtype).eps * exact.abs().max().item()
    mine, theirs = ((x.double() - exact).abs().max().item() for x in (got, eager))
    assert mine <= 2 * theirs + unit, f"{mine:.2e} from float64, eager {theirs:.2e}"


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_values(dtype: torch.dtype, freeze: bool) -> None:
    blocks, pictures, added = [], [], []
    for k, case in enumerate(CASES):
        block, x = block_of(case, bias=k % 3 > 0, act=(nn.ReLU6, nn.SiLU)[k % 2])
        blocks.append(block.to(dtype))
        pictures.append(x.to(dtype).contiguous(memory_format=(torch.contiguous_format, torch.channels_last)[k % 2]))
        y = blocks[-1](pictures[-1])
        added.append(torch.randn_like(y) if k % 2 else None)

    def fn(pictures: list[torch.Tensor], added: list[torch.Tensor | None]) -> list[torch.Tensor]:
        return [block(x, other) for block, x, other in zip(blocks, pictures, added, strict=True)]

    run, calls = compiled(fn, pictures, added, options={"freeze": freeze})
    assert calls == [OWN] * len(CASES)
    results = zip(run(pictures, added), fn(pictures, added), strict=True)
    for (got, eager), block, x, other in zip(results, blocks, pictures, added, strict=True):
        exact = copy.deepcopy(block).double()(x.double(), None if other is None else other.double())
        close(got, eager, exact)
        assert got.stride() == eager.stride()


@pytest.mark.parametrize("case", ["chunks, the last of them narrow", "first ones"])
@torch.no_grad()
def test_not_finite(case: str) -> None:
    """What is not finite, in the image or a weight, stays where eager has it: zeros outside are not multiplied."""
    block, x = block_of(case)
    run, calls = compiled(block, x)
    assert calls == [OWN]
    places = [x[0, 1, 4], block.first.weight[2, 1, 0], block.middle.weight[3, 0, 0], block.last.weight[1, 2, 0]]
    for value in (float("inf"), -float("inf"), float("nan")):
        for place in places:
            kept = place.clone()
            place[0] = value
            got, eager = run(x), block(x)
            torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-5, equal_nan=True)
            place.copy_(kept)
    torch.testing.assert_close(run(x), block(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_batches_that_vary() -> None:
    block, x = block_of("more images than one to a band")
    run, calls = compiled(block, x, dynamic=True)
    assert OWN not in calls  # of images whose size is not known, bands are not either
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(x, 0)
    run, calls = compiled(block, x)
    assert calls == [OWN]
    for batch in (1, 2, 5, 40):
        x = torch.randn(batch, *x.shape[1:])
        torch.testing.assert_close(run(x), block(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_fewer_threads_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands may be larger then: the workspace is for those, too."""
    block, x = Block(16, 96, 24, {}, (3, 1, 1)), torch.randn(7, 16, 14, 14)
    monkeypatch.setattr(images, "threads", lambda lowering: 4)
    threads = torch.get_num_threads()
    try:
        for fewer in (3, 2, 1):
            torch.set_num_threads(fewer)
            run, calls = compiled(block, x)
            assert calls == [OWN]
            torch.testing.assert_close(run(x), block(x), rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def test_images_that_lie_elsewhere() -> None:
    """Channels, and every other row, of a larger image; weights in another order."""
    block, x = block_of("one chunk")
    wide = torch.randn(2, 20, 12, 24).contiguous(memory_format=torch.channels_last)
    block.last.weight = nn.Parameter(torch.randn(32, 8, 1, 1).transpose(0, 1))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return block(x[:, 4:12, ::2])

    run, calls = compiled(fn, wide)
    assert calls == [OWN]
    torch.testing.assert_close(run(wide), fn(wide), rtol=1e-5, atol=1e-5)


def served(block: nn.Module, x: torch.Tensor) -> bool:
    with torch.no_grad():
        run, calls = compiled(block, x)
        torch.testing.assert_close(run(x), block(x), rtol=1e-4, atol=1e-4)
    return OWN in calls


@pytest.mark.parametrize(
    ("shape", "hidden", "first", "window"),
    [
        ((1, 8, 9, 400), 32, {}, (3, 1, 1)),  # so wide that rows of the middle would be made again and again
        ((1, 8, 3, 2000), 32, {}, (3, 1, (0, 1))),  # so wide that the middle of one row does not stay in a cache
        ((1, 32, 12, 12), 32, {"kernel_size": 3, "padding": 1}, (3, 1, 1)),  # whose first is Winograd's
        ((1, 8, 12, 12), 32, {}, ((3, 1), 1, (1, 0))),  # no square
        ((1, 8, 12, 12), 32, {}, (3, 1, 1, 2)),  # dilated
        ((1, 40, 12, 12), 20, {}, (3, 1, 1)),  # narrow in the middle
    ],
)
def test_what_is_left_to_the_library(shape: Any, hidden: int, first: Any, window: Any) -> None:
    assert not served(Block(shape[1], hidden, 16, first, window), torch.randn(shape))


def test_training_keeps_what_is_in_between() -> None:
    block, x = block_of("one chunk")
    seen: list[Compiled] = []
    run = torch.compile(block, backend="dicp_cpu")
    with observe(seen.append):
        run(x).sum().backward()
    assert OWN not in [c.claim.name for s in seen for c in s.program.library_calls]
