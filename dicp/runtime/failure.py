"""What a native segment's return code raises, and what a program refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicp.compat import forward_ad, library_error, tensors_from_handles
from dicp.errors import DicpError, VendorError, check_error
from dicp.ir import index as ix
from dicp.ir.printer import user_location
from dicp.schedule.defs import Call, View, operands


@dataclass(frozen=True)
class LibraryCall:
    """What raising a failed call again takes: the op and its arguments, with OPERAND where the words that the
    segment left have one. tensors: whether such a word is a tensor's handle, else a number."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[bool, ...]
    where: str

    @staticmethod
    def of(call: Call) -> LibraryCall:
        tensors = tuple(isinstance(v, View) for v in operands((call.args, call.kwargs)))
        where = user_location(call.node) or ""
        args, kwargs = _put(call.args, iter(())), _put(call.kwargs, iter(()))
        return LibraryCall(call.node.target, args, kwargs, tensors, where)

    def raise_again(self, words: Sequence[int]) -> None:
        """Call the op from Python on the same operands, so that the error is eager's own."""
        handles = [w for w, tensor in zip(words, self.tensors, strict=False) if tensor]
        owners = tensors_from_handles([w for w in words[len(self.tensors) :] if w])
        found = iter(tensors_from_handles(handles))
        values = [next(found) if tensor else w for w, tensor in zip(words, self.tensors, strict=False)]
        filled = iter(values)
        args, kwargs = _put(self.args, filled), _put(self.kwargs, filled)
        self.op(*args, **kwargs)
        del owners  # held up to here: the operands may lie in their memory


OPERAND = "an operand"


def _put(x: Any, values: Any) -> Any:
    """An argument structure with the next of `values` for each operand; OPERAND where there are none."""
    if isinstance(x, (View, ix.Poly)):
        return OPERAND
    if isinstance(x, str) and x == OPERAND:
        return next(values)
    if isinstance(x, dict):
        return {k: _put(v, values) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return tuple(_put(v, values) for v in x) if isinstance(x, tuple) else [_put(v, values) for v in x]
    return x


def refuse_tangents(args: Sequence[Any]) -> None:
    """Raises DicpError where an input has a tangent of forward-mode differentiation, which would be lost."""
    for x in args:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise DicpError(
                "a compiled function was given a tensor with a tangent (forward-mode differentiation)",
                todo="use torch.func.jvp, or compile the function that takes the derivative",
            )


def refuse_without_memory(e: RuntimeError) -> None:
    """Raises DicpError where an input's memory was asked for, and it has none that torch would tell: fake
    tensors pass as strided ones when the graph is traced."""
    if "that doesn't have storage" in str(e):
        raise DicpError(
            "a compiled function was given a tensor without memory of its own: one of MKL-DNN's layout, or a "
            "batch of gradients (is_grads_batched, vectorize=True)",
            todo="call .to_dense() on such a tensor before; for batches of gradients compile the function "
            "that takes them (torch.func.vmap), or take them one at a time",
        ) from e


def broken_claim(claim: str, op: str, where: str, problem: str) -> VendorError:
    """What is wrong with what a claim's call did, as the program runs."""
    return VendorError(f"the claim {claim!r}, for {op}, {problem}", where=where)


NO_MEMORY = -(1 << 30)
"""The code of a segment that was given no memory where there should be some."""
UNFORESEEN = 1 << 20
"""What the number of a call has more in the code of a segment where its result could not be laid out."""


@dataclass(frozen=True)
class Failure:
    """Raises what a native segment's return code stands for. Can be pickled."""

    messages: tuple[str, ...]  # of checks
    calls: tuple[LibraryCall, ...]

    def __call__(self, code: int, words: Sequence[int] = ()) -> None:
        if code > 0:
            raise check_error(self.messages[code - 1])
        if code == NO_MEMORY:
            raise DicpError(
                "an input has elements and no memory: a fake tensor, or one of zeros that autograd made",
                todo="pass real tensors; under FakeTensorMode call the function itself, not the compiled one",
            )
        if code < -UNFORESEEN:
            call = self.calls[-code - UNFORESEEN - 1]
            what = f"{call.op}: a result is of another size than was foreseen, or memory for it is short"
            todo = "free memory; where there is enough of it, this is a bug in dicp: report it"
            raise DicpError(what, where=call.where, todo=todo)
        call = self.calls[-code - 1]
        said = library_error() or "its message is on stderr"
        if len(words) and words[0]:
            call.raise_again(words[1:])
        raise DicpError(f"{call.op}: the library call failed: {said}", where=call.where)


def check_failure(messages: Sequence[str], calls: Sequence[Call]) -> Failure:
    """What to raise for a native segment's return code."""
    return Failure(tuple(messages), tuple(LibraryCall.of(c) for c in calls))
