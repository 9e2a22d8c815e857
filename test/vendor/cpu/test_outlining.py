"""Kernels that differ in sizes only have one body: which do, and that each keeps its sizes."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import TestCase

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph.outlining import Emitted, outline

SCALED = """\
// mul    model.py:{line}
// pointwise: i0 < {n}, i1 < {m}
void {name}(const float* b0, float* b1) {{
  for (int64_t i0 = 0; i0 < {n}; ++i0) {{
    for (int64_t i1 = 0; i1 < {m}; i1 += LANES) {{
      constexpr Full lanes;
      const vf32 v0 = load(b0 + {m} * i0 + i1, lanes);
      const vf32 v1 = v0 * {factor};  // mul    model.py:{line}
      store(b1 + {m} * i0 + i1, v1, lanes);
    }}
  }}
}}"""


def scaled(name: str, n: int, m: int, line: int = 1, factor: str = "64.0f") -> Emitted:
    text = SCALED.format(name=name, n=n, m=m, line=line, factor=factor)
    return Emitted(name, text, (f"model.py:{line}",))


class Texts(TestCase):
    def test_kernels_of_two_sizes(self) -> None:
        (found,) = outline([scaled("mul_a", 64, 128, 7), scaled("mul_b", 32, 256, 8)])
        self.assertEqual(found.origins, ("model.py:7", "model.py:8"))
        self.assertExpectedInline(
            found.text,
            """\
// Sizes are those of the kernels below; lines of the model, where they differ, the first one's.
__attribute__((noinline, noclone)) static void mul_a_of_sizes(const float* b0, float* b1, int64_t size0, int64_t size1) {
  for (int64_t i0 = 0; i0 < size0; ++i0) {
    for (int64_t i1 = 0; i1 < size1; i1 += LANES) {
      constexpr Full lanes;
      const vf32 v0 = load(b0 + size1 * i0 + i1, lanes);
      const vf32 v1 = v0 * 64.0f;  // mul    model.py:7
      store(b1 + size1 * i0 + i1, v1, lanes);
    }
  }
}

// mul    model.py:7
// pointwise: i0 < 64, i1 < 128
extern "C" __attribute__((visibility("default"))) void mul_a(const float* b0, float* b1) {
  mul_a_of_sizes(b0, b1, 64, 128);
}

// mul    model.py:8
// pointwise: i0 < 32, i1 < 256
extern "C" __attribute__((visibility("default"))) void mul_b(const float* b0, float* b1) {
  mul_a_of_sizes(b0, b1, 32, 256);
}""",
        )


def test_what_does_not_vary_stays_a_number() -> None:
    (found,) = outline([scaled("mul_a", 64, 128), scaled("mul_b", 32, 128)])
    assert "i1 < 128;" in found.text and "mul_a_of_sizes(b0, b1, 32);" in found.text


@pytest.mark.parametrize(
    "other",
    [
        scaled("mul_b", 64, 256, factor="65.0f"),  # another computation
        scaled("mul_b", 64, 16),  # a loop that is short enough to be unrolled
    ],
)
def test_what_is_not_shared(other: Emitted) -> None:
    first = scaled("mul_a", 64, 128)
    exported = [
        e.text.replace("\nvoid ", '\nextern "C" __attribute__((visibility("default"))) void ')
        for e in (first, other)
    ]
    assert [s.text for s in outline([first, other])] == exported


def blocks(x: torch.Tensor) -> torch.Tensor:
    """Norms, means and turned images at several sizes, of whole vectors and with tails."""
    out = x.new_zeros(())
    for n in (96, 64, 50, 34):
        y = x[..., :n, :n]
        y = (y - y.mean((-1, -2), keepdim=True)).contiguous(memory_format=torch.channels_last)
        out = out + torch.softmax(y, -1).amax((1, 2)).sum() + (y.transpose(-1, -2) + y).exp().mean(1).sum()
    return out


def test_results_of_shared_kernels() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 32, 96, 96)
    seen: list[Compiled] = []
    with observe(seen.append):
        found = torch.compile(blocks, backend="dicp_cpu")(x)
    source = "\n".join(seen[0].program.sources.values())
    bodies, calls = re.findall(r"static void (\w+_of_sizes)", source), re.findall(r"^  (\w+_of_sizes)\(", source, re.M)
    assert len(set(bodies)) >= 4 and all(calls.count(body) >= 2 for body in bodies)
    wanted = blocks(x.double())
    assert abs(found.double() - wanted) <= 1e-5 * abs(wanted)


def columns_of_both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:, :32].sin(), y[:, :32].sin()


def test_kernels_with_a_symbolic_size_too() -> None:
    """They differ in a stride, and have a parameter for the number of rows already."""
    seen: list[Compiled] = []
    compiled = torch.compile(columns_of_both, backend="dicp_cpu")
    for rows in (7, 9):
        x, y = torch.randn(rows, 96), torch.randn(rows, 128)
        for t in (x, y):
            torch._dynamo.mark_dynamic(t, 0)
            torch._dynamo.mark_static(t, 1)
        with observe(seen.append):
            torch.testing.assert_close(compiled(x, y), columns_of_both(x, y))
    assert len(seen) == 1 and "_of_sizes(" in "".join(seen[0].program.sources.values())
