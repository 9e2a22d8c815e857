"""Axes that become several since quotients of them are read at."""

from __future__ import annotations

import torch.nn.functional as F
from expecttest import TestCase
from lowered import compiled

from dicp.ir.kernel import show
from dicp.vendor.cpu_graph.axis_splitting import split_axes
from dicp.vendor.cpu_graph.codegen import emit


def last(fn, *shapes):
    return compiled(fn, *shapes).launches[-1].kernel


def norm(x, w, b):
    """Of four groups of channels, which lie last."""
    channels = x.permute(0, 3, 1, 2)
    return F.group_norm(channels, 4, w, b).permute(0, 2, 3, 1).contiguous() * 2


def windows(x):
    """3x3 windows of an image whose channels lie last, as rows."""
    cut = x.permute(0, 3, 1, 2).unfold(2, 3, 1).unfold(3, 3, 1)
    return cut.permute(0, 2, 3, 1, 4, 5).flatten(3) * 2


class TestText(TestCase):
    maxDiff = None

    def test_channels_of_a_group(self) -> None:
        kernel = last(norm, (1, 4, 4, 48), (48,), (48,))
        self.assertExpectedInline(show(split_axes(kernel, 16), notes=False), """\
kernel mul(arg0_1: f32, buf3: f32, buf5: f32, arg1_1: f32, arg2_1: f32, buf6: f32*)
  for i0 < 16, i1_0 < 4, i1_1 < 12
  v0: f32 = arg0_1[48*i0 + 12*i1_0 + i1_1]
  v1: f32 = buf3[i1_0]
  v2: f32 = sub(v0, v1)
  v3: f32 = buf5[i1_0]
  v4: f32 = mul(v2, v3)
  v5: f32 = arg1_1[12*i1_0 + i1_1]
  v6: f32 = mul(v4, v5)
  v7: f32 = arg2_1[12*i1_0 + i1_1]
  v8: f32 = add(v6, v7)
  v9: f32 = mul(v8, 2.0:f32)
  buf6[48*i0 + 12*i1_0 + i1_1] = v9""")

    def test_windows_as_rows(self) -> None:
        kernel = last(windows, (1, 4, 4, 32))
        self.assertExpectedInline(show(split_axes(kernel, 16), notes=False), """\
kernel mul(arg0_1: f32, buf1: f32*)
  for i0 < 2, i1 < 2, i2_0 < 32, i2_1 < 3, i2_2 < 3
  v0: f32 = arg0_1[128*i0 + 32*i1 + i2_0 + 128*i2_1 + 32*i2_2]
  v1: f32 = mul(v0, 2.0:f32)
  buf1[576*i0 + 288*i1 + 9*i2_0 + 3*i2_1 + i2_2] = v1""")


def weighed(x, columns, rows):
    """Sums of matrices that lie as rows, weighed by column and by row: means of positions."""
    w, h = columns.shape[0], rows.shape[0]
    return (x * columns.repeat(h)).sum(1), (x * rows.repeat_interleave(w)).sum(1)


def test_a_reduced_axis_is_split_too() -> None:
    """Of few sums: along them x would be gathered."""
    split = split_axes(last(weighed, (6, 35), (5,), (7,)), 4)
    assert [(a.size, a.reduced) for a in split.axes] == [(6, False), (7, True), (5, True)]
    text = emit(split, "f", 4)
    assert "// rows:" in text and "load_strided" not in text and "gather" not in text


def test_vectors_go_along_rows_whose_quotients_stay_within_them() -> None:
    """Of whole vectors no axis need be split: a quotient is one number in each, a remainder contiguous."""
    kernel = last(weighed, (6, 32), (8,), (4,))
    assert split_axes(kernel, 4) is kernel
    text = emit(kernel, "f", 4)
    assert "// rows:" in text and "load_strided" not in text and "gather" not in text


def test_what_knows_positions_along_a_reduced_axis_keeps_it() -> None:
    def largest(x, rows):
        return (x * rows.repeat_interleave(5)).argmax(1)

    kernel = last(largest, (64, 35), (7,))
    assert [a.size for a in split_axes(kernel, 4).axes] == [64, 35]


def test_quotients_by_several() -> None:
    kernel = last(lambda x, y, z: x * 2 + y.repeat_interleave(6) + z.repeat_interleave(30), (210,), (35,), (7,))
    assert [a.size for a in split_axes(kernel, 16).axes] == [7, 5, 6]


def test_nothing_is_gathered_then() -> None:
    for kernel in (last(norm, (1, 4, 4, 48), (48,), (48,)), last(windows, (1, 4, 4, 32))):
        assert "gather" not in emit(kernel, "f", 16)


def test_elements_that_fill_vectors_evenly_are_repeated() -> None:
    kernel = last(norm, (1, 4, 4, 32), (32,), (32,))
    assert split_axes(kernel, 16) is kernel
    assert "load_repeated<8>" in emit(kernel, "f", 16)


def test_an_axis_stays_whose_length_has_no_such_parts() -> None:
    kernel = last(lambda x: x.repeat_interleave(3)[:50] * 2, (20,))
    assert split_axes(kernel, 16) is kernel


def test_an_axis_stays_whose_parts_fill_no_vector() -> None:
    """Functions would be computed for three elements at a time, not for fifteen."""
    kernel = last(lambda x, y: (x.repeat_interleave(3) * y).tanh().exp().tanh().exp().tanh(), (5,), (15,))
    assert split_axes(kernel, 16) is kernel
