"""Axes in ranges within which no condition changes."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from lowered import compiled

from dicp.ir.kernel import expressions, show
from dicp.vendor.cpu_graph.codegen import emit
from dicp.vendor.cpu_graph.index_set_splitting import MOST, Range, split_ranges, split_rows
from dicp.vendor.cpu_graph.loops import choose_shape


def ranges(fn, *shapes) -> list[Range]:
    """Those that cover the axis which vectors of 16 go along."""
    kernel = compiled(fn, *shapes).launches[-1].kernel
    along = choose_shape(kernel, 16).vector
    assert along is not None
    found = split_ranges(kernel, along, 16)
    assert sum(r.axis.size for r in found) == along.size
    return found


def halves(x):
    """What rotary embeddings do to a row."""
    return torch.cat([-x[:, 32:], x[:, :32]], 1)


class TestText(TestCase):
    maxDiff = None

    def test_two_halves(self) -> None:
        text = "\n".join(f"from {r.start}: {show(r.kernel, notes=False)}" for r in ranges(halves, (8, 64)))
        self.assertExpectedInline(text, """\
from 0: kernel cat(arg0_1: f32, buf1: f32*)
  for i0 < 8, i1 < 32
  v0: f32 = arg0_1[32 + 64*i0 + i1]
  v1: f32 = neg(v0)
  buf1[64*i0 + i1] = v1
from 32: kernel cat(arg0_1: f32, buf1: f32*)
  for i0 < 8, i1 < 32
  v0: f32 = arg0_1[64*i0 + i1]
  buf1[32 + 64*i0 + i1] = v0""")


@pytest.mark.parametrize(
    ("fn", "shapes", "starts"),
    [
        (lambda x, y: torch.cat([x, y, x], 1) + 1, [(8, 40), (8, 32)], [0, 40, 72]),
        (lambda x: F.pad(x, (3, 5)) + 1, [(8, 200)], [0, 3, 203]),
        (lambda x: F.pad(x[:, ::2], (1, 0)).flip(1) + 1, [(8, 400)], [0, 200]),  # a condition on 200 - i
        (lambda x: F.max_pool2d(x, 3, 2, 1), [(2, 3, 99, 200)], [0, 1]),  # on 2 * i - 1
        (lambda x: F.pad(x, (1, 1)) + 1, [(8, 14)], [0]),  # three vectors instead of one
        (lambda x: x.triu() + 1, [(64, 64)], [0]),  # the other axis decides, too
        (lambda x: x + 1, [(8, 64)], [0]),
        (lambda x: torch.cat([x] * (MOST + 1), 1) + 1, [(8, 16)], [0]),  # too much text
        (lambda x: x.roll(5, 1) + 1, [(8, 200)], [0, 5]),
        (lambda x: x.repeat(1, 3) + 1, [(8, 150)], [0, 150, 300]),
        (lambda x: x.roll(3, 1) + 1, [(8, 56)], [0]),  # short enough to gather from constant places
        (lambda x: x.repeat(1, 9) + 1, [(8, 5)], [0]),  # begins again too often
        (lambda x: x.roll(16, 0) + 1, [(64, 64)], [0]),  # by rows
    ],
)
def test_where_ranges_begin(fn, shapes, starts) -> None:
    assert [r.start for r in ranges(fn, *shapes)] == starts


def gates(g, a, b):
    """The gradient of a gate whose channels lie last, in images of rows: more is read along the channels."""
    return torch.cat([g * b, g * a * (1 - b)], 2).transpose(1, 2).contiguous()


def beside(g, a):
    """Of an image whose channels lie last and one of rows: more is read and written along the rows."""
    return torch.cat([g.transpose(1, 2), a], 1) * 2


@pytest.mark.parametrize(
    ("fn", "shapes", "read", "kept"),
    [(gates, [(2, 256, 32)] * 3, 0, 2), (beside, [(2, 256, 32), (2, 32, 256)], 1, 0)],
)
def test_what_lies_across_the_vectors_of_parts_is_in_tiles(fn, shapes, read, kept) -> None:
    """Under a mask it is read, or its results are stored, an element to a cache line. Of a gate it is the
    result of each part, as that is less than its operands."""
    text = emit(compiled(fn, *shapes).launches[-1].kernel, "parts", 16)
    assert text.count(" from ") == 2
    assert len(re.findall(r"tile\d*\.load\(", text)) == read and len(re.findall(r"tile\d*\.store\(", text)) == kept
    assert "strided(" not in text and "masked" not in text and "where(" not in text


def test_all_parts_may_go_along_the_axis_that_is_split() -> None:
    """More is read along the rows than along the channels of the whole, and less of each part; the rows are too
    short for tiles."""

    def fn(g, turned, rows):
        along = torch.cat([*turned], 1) + sum(g[k : k + 15] for k in range(4))
        across = torch.cat([r[:, k : k + 15] * r[:, k + 1 : k + 16] for k, r in zip((0, 2, 4), rows, strict=True)])
        return across + along.t()

    torch.manual_seed(0)
    inputs = torch.randn(18, 96), torch.randn(3, 15, 32), torch.randn(3, 32, 20)
    kernel = compiled(fn, *(x.shape for x in inputs)).launches[-1].kernel
    whole = choose_shape(kernel, 16)
    (axis,) = whole.outer
    parts = split_ranges(kernel, axis, 16)
    assert len(parts) == 3 and all(choose_shape(r.kernel, 16).vector is r.axis for r in parts)
    with torch.no_grad():
        got = torch.compile(fn, backend="dicp_cpu")(*inputs)
    assert torch.allclose(got, fn(*inputs), atol=1e-5)


def unpacked(x, low, high):
    """A sum along rows that are made of one half's, or of the other's."""
    return (x * torch.cat([low * 2, high + 1])).sum(1)


def test_rows_are_split_where_their_parts_meet() -> None:
    kernel = compiled(unpacked, (1, 64), (24, 64), (16, 64)).launches[-1].kernel
    (axis,) = choose_shape(kernel, 16).outer
    found = split_rows(kernel, axis)
    assert [(r.start, r.axis.size) for r in found] == [(0, 24), (24, 16)]
    assert not any(e.op in ("where", "masked") for r in found for s in r.kernel.body for e in expressions(s))
    text = emit(kernel, "sums", 16)
    assert text.count("for (int64_t i0 = 0; i0 < ") == 2 and "where(" not in text


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x: x.tril().sum(1), [(64, 64)]),  # decided by the column, too
        (lambda x, y: torch.cat([x] * 5 + [y]).sum(1), [(16, 64), (16, 64)]),  # too much text
        (lambda x, y: torch.cat([x, y]).sum(1), [(16, 64), (8, 64)]),  # too few rows of one part
    ],
)
def test_rows_that_are_not(fn, shapes) -> None:
    kernel = compiled(fn, *shapes).launches[-1].kernel
    assert all(len(split_rows(kernel, a)) == 1 for a in choose_shape(kernel, 16).outer)
