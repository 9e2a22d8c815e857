"""What tests of the templates of products share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dicp.compiler import Compiled, observe

Fn = Callable[..., torch.Tensor]

ACTIVATIONS: dict[str, Fn] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def check(fn: Fn, *args: torch.Tensor, claim: str | tuple[str, ...] | None, **options: Any) -> None:
    """The compiled function's result; claim: the end of its one library call's name, or what may be; None where it
    has none."""
    seen: list[Compiled] = []
    with observe(seen.append):
        got = torch.compile(fn, backend="dicp_cpu", options=options)(*args)
    eager, exact = fn(*args), fn(*(a.double() if a.is_floating_point() else a for a in args))
    assert got.shape == eager.shape and got.stride() == eager.stride() and got.dtype == eager.dtype
    unit = torch.finfo(got.dtype).eps * exact.abs().max().item()
    mine, theirs = ((x.double() - exact).abs().max().item() for x in (got, eager))
    assert mine <= 2 * theirs + unit, f"{mine:.2e} from float64, eager {theirs:.2e}"
    names = [c.claim.name.rpartition(": ")[2] for s in seen for c in s.program.library_calls]
    if isinstance(claim, tuple):
        assert len(names) == 1 and names[0] in claim
    else:
        assert names == ([] if claim is None else [claim]), names
