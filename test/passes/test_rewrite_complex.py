"""rewrite_complex: arithmetic of complex numbers becomes arithmetic of their parts, where that pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bridge.checks import check, check_training
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of

from dicp.ir.printer import show
from dicp.passes.rewrite_complex import rewrite_complex
from dicp.schedule.kernels import Launch

C64 = torch.complex64


def rotary(x: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """As LLaMA's first code has it."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * f[None, :, None]).flatten(3).type_as(x)


class TestText(TestCase, CheckPass):
    def run_on(self, fn: Callable[..., Any], *inputs: Any) -> str:
        return show(self.check(rewrite_complex, graph_of(fn, *inputs), claims()))

    def test_a_rotary_embedding(self) -> None:
        text = self.run_on(rotary, (1, 4, 2, 6), torch.randn(4, 3, dtype=C64))
        self.assertExpectedInline(
            text,
            """\
graph(arg0_1: f32[1,4,2,6], arg1_1: c64[4,3]):
  v0: f32[1,4,2,3,2] = view(arg0_1, [1,4,2,-1,2])
  v1: f32[1,4,2,3] = select.int(v0, -1, 0)
  v2: f32[1,4,2,3] = select.int(v0, -1, 1)
  v3: f32[4,3,2] = view_as_real(arg1_1)
  v4: f32[4,3] = select.int(v3, -1, 0)
  v5: f32[4,3] = select.int(v3, -1, 1)
  v6: f32[1,4,3] = unsqueeze(v4, 0)
  v7: f32[1,4,3] = unsqueeze(v5, 0)
  v8: f32[1,4,1,3] = unsqueeze(v6, 2)
  v9: f32[1,4,1,3] = unsqueeze(v7, 2)
  v10: f32[1,4,2,3] = mul(v1, v8)
  v11: f32[1,4,2,3] = mul(v2, v9)
  v12: f32[1,4,2,3] = sub(v10, v11)
  v13: f32[1,4,2,3] = mul(v1, v9)
  v14: f32[1,4,2,3] = mul(v2, v8)
  v15: f32[1,4,2,3] = add(v13, v14)
  v16: f32[1,4,2,3,2] = stack([v12,v15], -1)
  v17: f32[1,4,2,6] = view(v16, [1,4,2,6])
  return v17
""",
        )

    def test_a_product_of_spectra_stays(self) -> None:
        """It would take parts of what one transform gives, and give a tensor to the other."""

        def between(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * w)

        self.assertNotIn("view_as_real", self.run_on(between, (4, 8), torch.randn(5, dtype=C64)))


def several(z: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    """Numbers, real tensors, views, sums."""
    a = (z * w + 2 * z - 1j) / x.exp()
    b = (a.conj() * (0.5 - 2j)).transpose(0, 1)[1:].sum(0, keepdim=True) - w[:, :1].t()
    return torch.view_as_real(-b), a.abs(), (a * x).angle()


def made(r: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.polar(r.abs(), x) * torch.complex(x, r))


def looked_up(z: torch.Tensor, i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(z[i] * torch.view_as_complex(x))


def shown_twice(x: torch.Tensor, w: torch.Tensor) -> Any:
    z = torch.view_as_complex(x) * w
    return z, torch.view_as_real(z)


def overwritten(x: torch.Tensor, w: torch.Tensor) -> Any:
    z = torch.view_as_complex(x) * w
    w.mul_(2)
    return torch.view_as_real(z * w)


def handed_on(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Parts on one side, a transform on the other."""
    z = (torch.view_as_complex(x) * w + w) * 2j
    return torch.fft.fft(z).real


def divided(z: torch.Tensor, x: torch.Tensor) -> Any:
    """By complex numbers, which have no quotient by parts, and of real tensors."""
    return (z * z / 2j).abs(), torch.view_as_real(z * z / (1 + 2j)), (x / 2j).abs(), (z * z / 2).abs()


def scaled(b: torch.Tensor, z: torch.Tensor, n: torch.Tensor) -> Any:
    """What is narrower than the parts, and does not widen beside numbers and tensors of no dims."""
    return (b * 1j).abs(), (b * z).abs(), torch.view_as_real(n * 2j), torch.view_as_real(n * z + b)


def numbers(z: torch.Tensor, x: torch.Tensor, h: torch.Tensor) -> Any:
    """With imaginary parts of zero, and of a precision without kernels."""
    a = (x * complex(2, 0)).conj() * z + z
    return torch.view_as_real(a), torch.view_as_real((x / (1 + 2j)) * z), torch.view_as_real((h * 1j) * z)


def returned_whole(z: torch.Tensor, w: torch.Tensor) -> Any:
    return z.t() * w.t() * w.t() + z.t()


def by_columns(x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.view_as_real(torch.view_as_complex(x) * w.t()), torch.view_as_real(w.t() * 2j)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "several": (
        several,
        lambda: (torch.randn(4, 5, dtype=C64), torch.randn(4, 5, dtype=C64), torch.randn(4, 5)),
    ),
    "double": (
        several,
        lambda: tuple(torch.randn(3, 4, dtype=d) for d in (torch.complex128,) * 2 + (torch.float64,)),
    ),
    "made": (made, lambda: (torch.randn(3, 70), torch.randn(3, 70))),
    "looked up": (
        looked_up,
        lambda: (torch.randn(9, 4, dtype=C64), torch.tensor([1, 8, 0]), torch.randn(3, 4, 2)),
    ),
    "shown twice": (shown_twice, lambda: (torch.randn(3, 4, 2), torch.randn(4, dtype=C64))),
    "overwritten": (overwritten, lambda: (torch.randn(3, 4, 2), torch.randn(4, dtype=C64))),
    "handed on": (handed_on, lambda: (torch.randn(3, 4, 2), torch.randn(4, dtype=C64))),
    "conjugated": (rotary, lambda: (torch.randn(2, 5, 3, 34), torch.randn(5, 17, dtype=C64).conj())),
    "negative": (
        rotary,
        lambda: (torch.randn(2, 5, 3, 34), torch.randn(5, 17, dtype=C64).conj().conj_physical()),
    ),
    "divided": (divided, lambda: (torch.randn(3, 4, dtype=C64), torch.randn(3, 4))),
    "scaled": (
        scaled,
        lambda: (torch.randn(3, 4).bfloat16(), torch.randn((), dtype=C64), torch.arange(12).view(3, 4)),
    ),
    "numbers": (
        numbers,
        lambda: (torch.randn(3, 4, dtype=C64), torch.randn(3, 4), torch.randn(3, 4).half()),
    ),
    "returned whole": (returned_whole, lambda: (torch.randn(4, 6, dtype=C64), torch.randn(4, 6, dtype=C64))),
    "by columns": (by_columns, lambda: (torch.randn(4, 3, 2), torch.randn(3, 4, dtype=C64))),
    "low precision": (rotary, lambda: (torch.randn(2, 5, 3, 34).bfloat16(), torch.randn(5, 17, dtype=C64))),
}


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES)
def test_as_eager(case: str) -> None:
    fn, inputs = CASES[case]
    check(fn, *inputs())


@pytest.mark.parametrize("backend", ["dicp_cpu", "dicp_cuda"])
def test_numbers_that_lie_as_they_come(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By columns, and conjugates of what lies in memory."""
    monkeypatch.setenv("DICP_CUDA_INTERPRET", "1")
    compiled, x = torch.compile(rotary, backend=backend, dynamic=False), torch.randn(1, 5, 2, 8)
    for f in (torch.randn(4, 5, dtype=C64).t(), torch.randn(5, 4, dtype=C64).conj()):
        torch.testing.assert_close(compiled(x, f), rotary(x, f))


def test_sizes_that_vary() -> None:
    compiled = torch.compile(rotary, backend="dicp_cpu", dynamic=True)
    for n in (3, 8, 17):
        x, f = torch.randn(2, n, 3, 16), torch.randn(n, 8, dtype=C64)
        torch.testing.assert_close(compiled(x, f), rotary(x, f))


def test_gradients() -> None:
    class Rotated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angles = torch.nn.Parameter(torch.randn(5, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return rotary(x * 2, torch.polar(torch.ones_like(self.angles), self.angles))

    check_training(Rotated(), torch.randn(2, 5, 3, 8, requires_grad=True))


@pytest.mark.parametrize(
    "fn", [lambda p: torch.view_as_real(1j * p * 2), lambda p: (torch.exp(1j * p) * 2).abs() * p]
)
def test_gradients_by_numbers(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Whose conjugates are calls in the backward."""
    p, q = (torch.linspace(-2, 2, 9).requires_grad_() for _ in range(2))
    torch.compile(fn, backend="dicp_cpu")(p).sum().backward()
    fn(q).sum().backward()
    torch.testing.assert_close(p.grad, q.grad)


def test_an_embedding_is_one_kernel() -> None:
    (graph,) = check(rotary, torch.randn(2, 5, 3, 32), torch.randn(5, 16, dtype=C64))
    assert [type(item) for item in graph.program.items] == [Launch]
