"""Backends with known faults: what the harness must find."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import register_backend

aten = torch.ops.aten


def _run(gm: torch.fx.GraphModule, faults: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    class Faulty(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return faults.get(target, target)(*args, **kwargs)

    def call(*args: Any) -> Any:
        return Faulty(gm).run(*args)

    call._boxed_call = False  # type: ignore[attr-defined]
    return call


def _broken_add(x: torch.Tensor, y: Any, **kwargs: Any) -> torch.Tensor:
    out = aten.add.Tensor(x, y, **kwargs)
    return out + 1e-3 if out.dtype == torch.float32 else out


def _hang(*args: Any, **kwargs: Any) -> None:
    time.sleep(1000)


def _crash(*args: Any, **kwargs: Any) -> None:
    os.abort()


def _lose_device() -> None:
    """As a kernel does that writes outside its memory: the device is lost, to all that follow."""
    from dicp.conformance import unit

    unit.device_lost = lambda device: True


def _stray(x: torch.Tensor) -> torch.Tensor:
    _lose_device()
    return aten.tan.default(x)


def _eager_astray() -> None:
    """asinh loses the device under eager too."""
    from dicp.conformance.unit import Runner

    plain = Runner.eager

    def eager(self: Any, case: Any, *seed: int) -> Any:
        if self.op.name == "asinh":
            _lose_device()
        return plain(self, case, *seed)

    Runner.eager = eager  # type: ignore[method-assign]


def _transposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    out = aten.exp.default(x)
    return out.mT.contiguous().mT if out.dim() > 1 else out


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("toy: no cosine here")


def _last_bit(x: torch.Tensor) -> torch.Tensor:
    """Within the rule: one ulp off."""
    out = aten.sin.default(x)
    return torch.nextafter(out, torch.full_like(out, 9.0)) if out.dtype == torch.float32 else out


def _clamping(x: torch.Tensor, dim: int, index: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Right where indices are in range, and never an error."""
    size = x.shape[dim] if x.dim() else 1
    return aten.gather.default(x, dim, index.clamp(0, size - 1), **kwargs)


FAULTS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _broken_add,
    aten.exp.default: _transposed,
    aten.cos.default: _refuse,
    aten.sin.default: _last_bit,
    aten.erf.default: _crash,
    aten.ceil.default: _hang,
    aten.tan.default: _stray,
    aten.gather.default: _clamping,
}


def toy(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """add is off by 1e-3, exp has other strides, cos is refused, erf aborts, ceil hangs, tan loses
    the device, gather does not look at its indices."""
    return aot_autograd(fw_compiler=lambda g, _: _run(g, FAULTS))(gm, inputs)


register_backend(toy, "toy")
_eager_astray()
