"""The GPU that a call runs on. It is no part of a program: one compiled on a GPU serves the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dicp import compat
from dicp.schedule.defs import Buffer, Lowered


def anchor_of(lowered: Lowered) -> int | None:
    """The input whose device is the program's: the first that is no mere number."""
    inputs = enumerate(lowered.inputs)
    return next((k for k, b in inputs if isinstance(b, Buffer) and b.shape != ()), None)


def device_finder(lowered: Lowered) -> Callable[[list[Any]], torch.device | None]:
    """What tells a call's device from its inputs: that of the anchor, else of a number that lies on a GPU,
    else the one that was traced."""
    anchor, traced = anchor_of(lowered), lowered.device
    if anchor is not None:
        return lambda args: args[anchor].device
    numbers = [k for k, b in enumerate(lowered.inputs) if isinstance(b, Buffer)]
    return lambda args: next((args[k].device for k in numbers if args[k].is_cuda), traced)


def on_device(call: Callable[[list[Any]], Any], lowered: Lowered) -> Callable[[list[Any]], Any]:
    """The call, made with the program's device as the current one."""
    current, find = compat.current_cuda_device, device_finder(lowered)

    def on_its_device(args: list[Any]) -> Any:
        device = find(args)
        if device is None or device.index is None or device.index == current():
            return call(args)
        with torch.cuda.device(device):
            return call(args)

    on_its_device._boxed_call = True  # type: ignore[attr-defined]
    return on_its_device


__all__ = ["anchor_of", "on_device"]
