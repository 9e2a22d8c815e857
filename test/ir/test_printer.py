"""The printed form of FX graphs."""

from __future__ import annotations

import os

import torch
from expecttest import TestCase
from graphs import graph_of

from dicp.ir.printer import show, user_line, user_location


class TestShow(TestCase):
    def test_addmm_relu_prints_typed_ssa(self) -> None:
        g = graph_of(lambda b, x, w: torch.relu(torch.addmm(b, x, w)), (4,), (8, 16), (16, 4))
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[4], arg1_1: f32[8,16], arg2_1: f32[16,4]):
  v0: f32[8,4] = addmm(arg0_1, arg1_1, arg2_1)
  v1: f32[8,4] = relu(v0)
  return v1
""",
        )

    def test_overload_dtype_and_device_arguments(self) -> None:
        g = graph_of(lambda x: x.sum(1, keepdim=True).to(torch.bfloat16) + torch.ones(2), (2, 3))
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[2,3]):
  v0: f32[2,1] = sum.dim_IntList(arg0_1, [1], True)
  v1: bf16[2,1] = _to_copy(v0, dtype=bf16)
  v2: f32[2] = full([2], 1, dtype=f32)
  v3: f32[2,2] = add(v1, v2)
  return v3
""",
        )

    def test_several_results_and_int_max(self) -> None:
        g = graph_of(lambda x: (x.topk(2)[1], x[:, 1:]), (2, 3))
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: f32[2,3]):
  v0: (f32[2,2], i64[2,2]) = topk(arg0_1, 2)
  v1: i64[2,2] = v0[1]
  v2: f32[2,2] = slice(arg0_1, 1, 1, max)
  return v1, v2
""",
        )

    def test_symbolic_sizes_are_numbered_from_zero(self) -> None:
        g = graph_of(lambda x: x.reshape(-1), (3, 5), dynamic=True)
        self.assertExpectedInline(
            show(g),
            """\
graph(arg0_1: Sym(s0), arg1_1: Sym(s1), arg2_1: f32[s0,s1]):
  v0: f32[s0*s1] = view(arg2_1, [-1])
  return v0
""",
        )

    def test_locations_name_the_user_line(self) -> None:
        def model(x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)  # the line asked for

        g = graph_of(model, (3,))
        node = next(n for n in g.graph.nodes if n.op == "call_function")
        line = model.__code__.co_firstlineno + 1
        where = f"test_printer.py:{line}  return torch.relu(x)  # the line asked for"
        self.assertEqual(user_location(node), where)
        self.assertIn(f"= relu(arg0_1)  # {where}", show(g, locations=True))
        assert user_line(node) is not None
        self.assertEqual(user_line(node)[1], line)

    def test_a_model_in_a_folder_named_torch(self) -> None:
        g = graph_of(lambda x: x.relu(), (3,))
        node = next(n for n in g.graph.nodes if n.op == "call_function")
        inside = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "activation.py")
        node.meta["stack_trace"] = (
            '  File "/home/user/torch/model.py", line 7, in forward\n    return self.act(x)\n'
            f'  File "{inside}", line 8, in forward\n    return torch.relu(x)\n'
        )
        self.assertEqual(user_location(node), "model.py:7  return self.act(x)")

    def test_lines_that_go_on(self) -> None:
        def model(x: torch.Tensor) -> torch.Tensor:
            y = x.exp() + \
                x
            return y * 2 + \
                y.sum(0)

        g = graph_of(model, (3,))
        where = [str(user_location(n)) for n in g.graph.nodes if n.op == "call_function"]
        self.assertTrue(where and not any(w.endswith("\\") for w in where), where)
        x = torch.randn(3)
        self.assertTrue(torch.allclose(torch.compile(model, backend="dicp_cpu")(x), model(x)))
