"""Tensors on another device than the program's. There is one more wherever the tests run: torch's meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dicp.config import Config
from dicp.errors import UnsupportedOp
from dicp.schedule.defs import Buffer, Call, Lowered
from dicp.schedule.lower import lower
from dicp.vendor.cuda_graph import CudaGraph, gpu


def written(x: torch.Tensor, m: torch.Tensor) -> Any:
    m.mul_(2)
    x.add_(1)
    m.copy_(x.to("meta"))
    return x * 2, m + 1, m[1:], x[1:]


CASES: dict[str, Callable[..., Any]] = {
    "sent": lambda x, m: ((x + 1).to("meta"), x * 2),
    "made_there": lambda x, m: (torch.zeros(3, device="meta"), torch.arange(4, device="meta") + 1, x * 2),
    "beside_each_other": lambda x, m: (m @ m.t(), x @ x.t(), torch.cat([m, m]), x.softmax(-1)),
    "nothing_here": lambda x, m: (m + 1).softmax(-1) * 2,
    "convolved": lambda x, m: (F.conv2d(m[None, None], m[None, None]), x.relu()),
    "views": lambda x, m: (m.t(), m[1:].view(-1), x.t()),
    "written": written,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_tensors_elsewhere_are_left_to_eager(name: str, dynamic: bool) -> None:
    """Their addresses were taken for ones of the program's device: the process died, or results were here."""
    fn = CASES[name]
    x = torch.randn(4, 4)
    compiled = torch.compile(fn, backend="dicp_cpu", fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        mine, theirs = [x.clone(), x.to("meta")], [x.clone(), x.to("meta")]
        got, expected = tensors([compiled(*mine), mine]), tensors([fn(*theirs), theirs])
        assert len(got) == len(expected)
        for a, e in zip(got, expected, strict=True):
            assert (a.device, a.shape, a.dtype, a.stride()) == (e.device, e.shape, e.dtype, e.stride())
            if a.device.type == "cpu":
                torch.testing.assert_close(a, e)


def test_a_number_on_the_cpu_goes_along() -> None:
    compiled = torch.compile(lambda m, s: m * s, backend="dicp_cpu", fullgraph=True)
    assert compiled(torch.empty(3, device="meta"), torch.tensor(2.0)).device.type == "meta"


def test_strict_says_which_device() -> None:
    compiled = torch.compile(lambda x, m: (x + 1, m + 1), backend="dicp_cpu", options={"strict": True})
    with pytest.raises(Exception, match="a tensor is on meta, the program's are on cpu") as e:
        compiled(torch.ones(3), torch.empty(3, device="meta"))
    assert UnsupportedOp.__name__ in str(e.value)


def on_a_gpu(fn: Callable[..., Any], *sizes: tuple[tuple[int, ...], str]) -> Lowered:
    """What a program for a GPU becomes, where there is none."""
    vendor = CudaGraph()
    vendor.machine = lambda config: gpu(32)  # type: ignore[method-assign]
    with FakeTensorMode():
        graph = make_fx(fn)(*(torch.empty(shape, device=device) for shape, device in sizes))
    return lower(graph, vendor, Config.make())


def calls(lowered: Lowered) -> list[str]:
    return [str(d.node.target) for d in lowered.defs if isinstance(d, Call)]


def test_copies_between_devices_are_calls() -> None:
    lowered = on_a_gpu(lambda x, c: (x - c.to(x.device), (x + 1).cpu()), ((4, 4), "cuda"), ((4, 4), "cpu"))
    assert calls(lowered) == ["aten._to_copy.default"] * 2
    assert [type(b) is Buffer for b in lowered.inputs] == [True, False]


def test_numbers_for_the_gpu_are_inputs_and_those_for_the_cpu_are_not() -> None:
    goes_along = on_a_gpu(lambda x, s: (x * s,), ((4,), "cuda"), ((), "cpu"))
    assert not calls(goes_along) and all(type(b) is Buffer for b in goes_along.inputs)
    stays = on_a_gpu(lambda x, s: (x * s, s + 1), ((4,), "cuda"), ((), "cpu"))
    assert calls(stays) == ["aten.mul.Tensor", "aten.add.Tensor"]


def test_of_two_gpus_one_is_the_programs() -> None:
    lowered = on_a_gpu(lambda x, y: (x + 1, y + 1, x + y.to(x.device)), ((4,), "cuda:0"), ((4,), "cuda:1"))
    assert calls(lowered) == ["aten.add.Tensor", "aten._to_copy.default"]
