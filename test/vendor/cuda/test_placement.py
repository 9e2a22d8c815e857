"""The GPU that a call runs on: told from its inputs, wherever the program was compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dicp.schedule.defs import Buffer, Lowered
from dicp.vendor.cuda_graph import placement

FIRST, SECOND, HOST = (torch.device(name) for name in ("cuda:0", "cuda:1", "cpu"))


def program(*shapes: tuple[int, ...], traced: torch.device = FIRST) -> Lowered:
    lowered = Lowered()
    lowered.device = traced
    lowered.inputs = [Buffer(f"arg{k}", s, torch.float32, (1,) * len(s), "input") for k, s in enumerate(shapes)]
    return lowered


def on(*devices: torch.device) -> list[Any]:
    return [SimpleNamespace(device=d, is_cuda=d.type == "cuda") for d in devices]


@pytest.mark.parametrize(
    "lowered, args, device",
    [
        (program((), (4,)), on(HOST, SECOND), SECOND),  # the tensor that is no number
        (program((), ()), on(HOST, SECOND), SECOND),  # the number that is not on the host
        (program(()), on(HOST), FIRST),
        (program(traced=SECOND), on(), SECOND),  # torch.arange(8, device="cuda:1")
    ],
)
def test_the_device_of_a_call(lowered: Lowered, args: list[Any], device: torch.device) -> None:
    assert placement.device_finder(lowered)(args) == device


def test_a_call_is_made_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    class On:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(placement.compat, "current_cuda_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", On)
    call = placement.on_device(lambda args: current[-1], program((4,)))
    assert [call(on(FIRST)), call(on(SECOND)), current] == [0, 1, [0]]
    assert placement.on_device(lambda args: current[-1], program(traced=SECOND))([]) == 1
