"""pad_channels: images of few channels are filled up for vendors that ask for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from expecttest import TestCase
from graphs import CheckPass, claims, graph_of
from torch.fx import GraphModule

from dicp.ir.printer import show
from dicp.passes.canonicalize import canonicalize
from dicp.passes.pad_channels import pad_channels
from dicp.passes.rewrite_conv import rewrite_conv


class Wide(claims):
    """A vendor that computes with four channels at the least."""

    def padded_channels(self, node: Any) -> int | None:
        return 4 if node.args[1].meta["val"].shape[1] < 4 else None


def graph(channels: int) -> GraphModule:
    g = graph_of(
        lambda x, w: torch.relu(F.conv2d(x, w, padding=1)), (2, channels, 8, 8), (6, channels, 3, 3)
    )
    return rewrite_conv(canonicalize(g), claims())


class TestPadChannels(TestCase, CheckPass):
    def test_image_and_weight_get_zeros(self) -> None:
        self.assertExpectedInline(
            show(self.check(pad_channels, graph(3), Wide())),
            """\
graph(arg0_1: f32[2,3,8,8], arg1_1: f32[6,3,3,3]):
  v0: f32[2,4,8,8] = constant_pad_nd(arg0_1, [0,0,0,0,0,1], 0)
  v1: f32[6,4,3,3] = constant_pad_nd(arg1_1, [0,0,0,0,0,1], 0)
  v2: f32[2,6,8,8] = dicp.conv(v0, v1, None, None, [1,1], [1,1], [1,1], 1, relu)
  return v2
""",
        )

    def test_enough_channels_or_no_say(self) -> None:
        for channels, vendor in ((4, Wide()), (3, claims())):
            g = graph(channels)
            text = show(g)
            self.assertEqual(show(self.check(pad_channels, g, vendor)), text)
