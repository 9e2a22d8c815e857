"""The verifier accepts traced graphs and names what contradicts the meta."""

from __future__ import annotations

import pytest
import torch
from graphs import graph_of
from torch.fx import GraphModule, Node

from dicp.errors import VerifyError
from dicp.ir.meta_keys import STRIDE_WAIVED
from dicp.ir.verify import insert, verify
from dicp.ops.library import register

aten = torch.ops.aten


def only_call(g: GraphModule, target: object) -> Node:
    (node,) = (n for n in g.graph.nodes if n.target is target)
    return node


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x @ w).transpose(0, 1), -1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_traced_graph_passes(dynamic: bool) -> None:
    g = graph_of(layer, (4, 8), (8, 16), dynamic=dynamic)
    verify(g)


def test_verify_adds_no_guard() -> None:
    g = graph_of(layer, (4, 8), (8, 16), dynamic=True)
    value = only_call(g, aten.relu.default).meta["val"]
    guards = len(value.fake_mode.shape_env.guards)
    verify(g)
    assert len(value.fake_mode.shape_env.guards) == guards


def test_wrong_dtype_names_node_and_line() -> None:
    g = graph_of(layer, (4, 8), (8, 16))
    node = only_call(g, aten.relu.default)
    node.meta["val"] = node.meta["val"].to(torch.float64)
    with pytest.raises(VerifyError, match=r"relu = relu\(mm\): meta says dtype f64.*gives f32") as error:
        verify(g)
    assert "test_verify.py" in str(error.value)


def test_wrong_shape() -> None:
    g = graph_of(layer, (4, 8), (8, 16))
    node = only_call(g, aten.relu.default)
    node.meta["val"] = node.meta["val"].new_empty(4, 15)
    with pytest.raises(VerifyError, match=r"meta says shape \[4,15\], the operator gives \[4,16\]"):
        verify(g)


def test_wrong_stride_unless_waived() -> None:
    g = graph_of(layer, (4, 8), (8, 16))
    node = only_call(g, aten._softmax.default)
    node.meta["val"] = node.meta["val"].t().contiguous().t()
    if node.meta["val"].stride() == (4, 1):
        node.meta["val"] = node.meta["val"].contiguous()
    with pytest.raises(VerifyError, match="meta says stride"):
        verify(g)
    node.meta[STRIDE_WAIVED] = True
    verify(g)


def test_missing_meta() -> None:
    g = graph_of(layer, (4, 8), (8, 16))
    del only_call(g, aten.relu.default).meta["val"]
    with pytest.raises(VerifyError, match=r"meta\['val'\] is missing"):
        verify(g)


def test_arguments_the_operator_refuses() -> None:
    g = graph_of(layer, (4, 8), (8, 16))
    node = only_call(g, aten.mm.default)
    node.args = (node.args[0], node.args[0])
    with pytest.raises(VerifyError, match="fake propagation fails"):
        verify(g)


def test_insert_infers_and_copies_origin() -> None:
    g = graph_of(layer, (4, 8), (8, 16), dynamic=True)
    relu = only_call(g, aten.relu.default)
    with g.graph.inserting_after(relu):
        node = insert(g.graph, aten.sum.dim_IntList, (relu, [1]), like=relu)
    assert str(node.meta["val"].shape[0]) == str(relu.meta["val"].shape[0])
    assert node.meta["stack_trace"] == relu.meta["stack_trace"]


def test_insert_that_fails_leaves_no_node() -> None:
    g = graph_of(layer, (4, 8), (8, 16))
    relu = only_call(g, aten.relu.default)
    before = len(g.graph.nodes)
    with g.graph.inserting_after(relu), pytest.raises(RuntimeError):
        insert(g.graph, aten.mm.default, (relu, relu), like=relu)
    assert len(g.graph.nodes) == before


class TestLibrary:
    """The fake implementations of dicp::* agree with the references."""

    @staticmethod
    def check(op: object, *args: object) -> torch.Tensor:
        register()
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
        return op(*args)  # type: ignore[operator]

    @pytest.mark.parametrize("act", ["none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"])
    def test_linear(self, act: str) -> None:
        register()
        x, w, b = torch.randn(2, 3, 8), torch.randn(4, 8), torch.randn(4)
        other = torch.randn(3, 2, 4).transpose(0, 1)
        y = self.check(torch.ops.dicp.linear.default, x, w, b, other, act)
        assert y.is_contiguous()

    @pytest.mark.parametrize("last", [False, True])
    def test_conv(self, last: bool) -> None:
        register()
        x, w = torch.randn(2, 4, 8, 8), torch.randn(6, 2, 3, 3)
        x = x.to(memory_format=torch.channels_last) if last else x
        op = torch.ops.dicp.conv.default
        y = self.check(op, x, w, None, torch.randn(2, 6, 8, 8), [1, 1], [1, 1], [1, 1], 2, "relu")
        assert y.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("masked", [None, torch.bool, torch.float32])
    def test_attention_is_sdpa(self, causal: bool, masked: torch.dtype | None) -> None:
        register()
        q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
        mask = None if masked is None else (torch.rand(2, 1, 5, 7) > 0.5).to(masked)
        if masked is torch.bool:
            mask[0, 0, 2] = False
        y = self.check(torch.ops.dicp.attention.default, q, k, v, mask, causal, None)
        if masked is None or not causal:
            expected = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, enable_gqa=True
            )
            torch.testing.assert_close(y, expected)
