"""The operands of the operators that are convolutions, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from dicp.ops.library import register

aten = torch.ops.aten


@dataclass(frozen=True)
class ConvCall:
    """A call of aten.convolution, aten.convolution_backward or dicp::conv, as it stands when asked for: a
    pass that replaces operands asks again. Tensors are what the caller has in their places, nodes or views;
    what an operator lacks is None, "none" or False."""

    node: Node
    x: Any
    weight: Any
    bias: Any
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    transposed: bool = False
    output_padding: Sequence[int] = ()
    other: Any = None
    """what is added to the result, before the activation"""
    act: str = "none"
    grad: Any = None
    """of convolution_backward: the result's gradient"""
    bias_sizes: Sequence[int] | None = None
    mask: tuple[bool, bool, bool] = (False, False, False)
    """which gradients are asked for: of x, of the weight, of the bias"""

    @property
    def is_backward(self) -> bool:
        return self.grad is not None

    @property
    def result(self) -> Any:
        """What has the shape of the convolution's result: the node, or the result's gradient."""
        return self.grad if self.is_backward else self.node

    def masked(self, of_x: bool, of_weight: bool, of_bias: bool) -> tuple[Any, ...]:
        """The arguments of convolution_backward for other gradients."""
        return (*self.node.args[:-1], [of_x, of_weight, of_bias])


def conv_call(node: Node, args: Sequence[Any] | None = None) -> ConvCall | None:
    """The call of a node, None where it is of no convolution. args: what stands in the place of its own."""
    register()
    a = node.args if args is None else args
    if node.target is torch.ops.dicp.conv.default:
        x, weight, bias, other, stride, padding, dilation, groups, act = a
        return ConvCall(node, x, weight, bias, stride, padding, dilation, groups, other=other, act=act)
    if node.target is aten.convolution.default:
        x, weight, bias, stride, padding, dilation, transposed, more, groups = a
        return ConvCall(node, x, weight, bias, stride, padding, dilation, groups, bool(transposed), more)
    if node.target is aten.convolution_backward.default:
        grad, x, weight, bias_sizes, stride, padding, dilation, transposed, more, groups, mask = a
        return ConvCall(
            node,
            x,
            weight,
            None,
            stride,
            padding,
            dilation,
            groups,
            bool(transposed),
            more,
            grad=grad,
            bias_sizes=bias_sizes,
            mask=tuple(map(bool, mask)),  # type: ignore[arg-type]
        )
    return None


def the_conv_call(node: Node, args: Sequence[Any] | None = None) -> ConvCall:
    """The same of a node that is known to be one."""
    call = conv_call(node, args)
    assert call is not None, node.target
    return call


class SeparableCall(NamedTuple):
    """The arguments of dicp::separable, in its order; tensors as in ConvCall."""

    x: Any
    w1: Any
    b1: Any
    other: Any
    w2: Any
    b2: Any
    w3: Any
    b3: Any
    stride1: Sequence[int]
    padding1: Sequence[int]
    stride2: Sequence[int]
    padding2: Sequence[int]
    act1: str
    act2: str


def separable_call(node: Node, args: Sequence[Any] | None = None) -> SeparableCall | None:
    """The call of a node, None where it is of another operator. args: what stands in the place of its own."""
    register()
    if node.target is not torch.ops.dicp.separable.default:
        return None
    return SeparableCall(*(node.args if args is None else args))


def pair(values: Sequence[int]) -> tuple[int, int]:
    """Both of two dimensions, of which one number may stand for both."""
    return values[0], values[-1]
