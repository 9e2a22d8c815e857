"""A graph with frozen weights, at run time: what depends on weights alone is computed once and kept, for as
long as the weights are the same.

The same: the same tensor objects, at the same addresses, with the same version counters, which writes through
torch bump. Two do not: steps of fused optimizers are watched, and of vectors that are buffers, which eager's
batch norm writes in training, the elements are compared. While results are kept, so is the memory that the
weights had then (not the tensors themselves): no other tensor can come to lie there.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from dicp.passes.freeze import Folding

log = logging.getLogger("dicp")

Call = Callable[[list[Any]], Any]
RESTLESS = 8  # runs of the constant program in a row, each for one call, before a warning says so
UNCOUNTED = "some weights were made under torch.inference_mode(), where changes leave no trace"
MOST_CHANNELS = 1 << 16  # longer vectors are tables
_versions = operator.attrgetter("_version")
_addresses = torch.Tensor.data_ptr
_differ = ctypes.PyDLL(None).memcmp  # which keeps the interpreter's lock: these are short
_differ.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
_all: weakref.WeakSet[Frozen] = weakref.WeakSet()


@dataclass(eq=False)
class State:
    """What weights are compared by; versions: None where they have no counters; contents: by position,
    address and bytes of those whose writes may not be counted."""

    ids: tuple[int, ...]
    addresses: list[int]
    versions: list[int] | None
    contents: dict[int, tuple[int, bytes]]

    @staticmethod
    def of(ids: tuple[int, ...], weights: Sequence[torch.Tensor]) -> State:
        versions: list[int] | None
        try:
            versions = list(map(_versions, weights))
        except RuntimeError:  # made under torch.inference_mode(), where writes leave no trace
            versions = None
        contents = {
            k: (w.data_ptr(), ctypes.string_at(w.data_ptr(), w.nbytes))
            for k, w in enumerate(weights)
            if _may_be_statistics(w)
        }
        return State(ids, list(map(_addresses, weights)), versions, contents)

    def holds(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors of these ids are as they were."""
        return (
            self.versions is not None
            and list(map(_versions, weights)) == self.versions
            and list(map(_addresses, weights)) == self.addresses
            and not any(_differ(address, then, len(then)) for address, then in self.contents.values())
        )

    def write(self, weights: Set[int]) -> None:
        """Have the tensors of these ids differ from what they were."""
        if self.versions is not None:
            self.versions = [-1 if k in weights else v for k, v in zip(self.ids, self.versions, strict=True)]

    def changed(self, now: State, names: Sequence[str]) -> list[str]:
        """Names of the weights that differ."""
        before = zip(self.ids, self.addresses, self.versions or self.ids, strict=True)
        after = zip(now.ids, now.addresses, now.versions or now.ids, strict=True)
        pairs = enumerate(zip(names, before, after, strict=True))
        return [n for k, (n, a, b) in pairs if a != b or self.contents.get(k) != now.contents.get(k)]


def _may_be_statistics(w: torch.Tensor) -> bool:
    """Whether this may be a running mean or variance. Only where they can be compared without a wait."""
    vector = w.dim() == 1 and w.is_contiguous() and w.is_floating_point() and 0 < w.numel() <= MOST_CHANNELS
    if not vector or w.device.type != "cpu" or isinstance(w, nn.Parameter) or not w.data_ptr():
        return False
    end = (w.storage_offset() + w.numel()) * w.itemsize
    return w.untyped_storage().nbytes() >= end


@dataclass(eq=False)
class Kept:
    """The results for one set of weights."""

    values: list[Any]
    state: State
    memory: list[torch.Tensor]  # what the weights' data lay in
    references: list[weakref.ref[torch.Tensor]]  # to the weights: with the first that goes, this goes


class Frozen:
    """Calls the main program with its own inputs and the results of the constant program.

    One graph may serve several modules (layers of one class), so results are kept for each set of weights,
    until one of those weights is gone.
    """

    def __init__(
        self,
        name: str,
        main: Call,
        constants: Call,
        folding: Folding,
        pack: Callable[[torch.Tensor, str], Any] | None = None,
    ) -> None:
        """pack: of the vendor (`Vendor.pack`), where the folding has forms."""
        self.name, self.main, self.constants, self.folding = name, main, constants, folding
        self.pack = pack
        self.runs = 0
        self._weights, self._others = picker(folding.frozen), picker(folding.kept)
        self._kept: dict[tuple[int, ...], Kept] = {}
        self._last: State | None = None
        self._used, self._unused_runs = True, 0
        self._lock = threading.Lock()
        self._boxed_call = True
        _all.add(self)

    def __call__(self, args: list[Any]) -> Any:
        """`args`: a list of the graph's inputs, which is emptied."""
        weights = self._weights(args)
        ids = tuple(map(id, weights))
        kept = self._kept.get(ids)
        if kept is not None and kept.state.holds(weights):
            self._used = True
        else:
            kept = self._fold(ids, weights)
        given = [*self._others(args), *kept.values]
        del weights
        args.clear()
        return self.main(given)

    def forget(self) -> None:
        """Have the next call compute everything anew."""
        self._kept.clear()

    def written(self, weights: Set[int]) -> None:
        """Have the tensors of these ids count as changed."""
        for kept in list(self._kept.values()):
            kept.state.write(weights)

    def _fold(self, ids: tuple[int, ...], weights: Sequence[torch.Tensor]) -> Kept:
        with self._lock:
            kept = self._kept.get(ids)
            if kept is not None and kept.state.holds(weights):  # another thread was faster
                return kept
            _watch_steps()
            modules = len(self._kept)
            kept = self._compute(ids, weights)
            self._kept[ids] = kept
            self._tell(kept.state, another=modules > 0 and len(self._kept) > modules)
            return kept

    def _compute(self, ids: tuple[int, ...], weights: Sequence[torch.Tensor]) -> Kept:
        kept = self._kept

        def end(_: Any) -> None:
            kept.pop(ids, None)

        state = State.of(ids, weights)  # before the values: what is written meanwhile shows at the next call
        with torch.no_grad():
            memory = [w.detach() for w in weights]
            results = self.constants(list(weights))
        pairs = zip(results, self.folding.forms, strict=True)
        values = [r if form is None else self.pack(r, form) for r, form in pairs]  # type: ignore[misc]
        if weights[0].device.type != "cpu":  # later calls may be on other streams
            torch.accelerator.synchronize(weights[0].device)
        self.runs += 1
        return Kept(values, state, memory, [weakref.ref(w, end) for w in weights])

    def _tell(self, now: State, another: bool) -> None:
        """Why the constant program ran, unless it did so for the first time. another: for one more module."""
        last, self._last = self._last, now
        if last is None:
            if now.versions is None:
                log.warning("%s: nothing is kept under freeze: %s", self.name, UNCOUNTED)
            return
        changed = last.changed(now, self.folding.names)
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        if another:
            log.info("%s: weights folded for one more module", self.name)
        elif changed and now.versions is not None:
            log.warning("%s: weights folded again: %s%s changed", self.name, changed[0], more)
        self._unused_runs = 0 if self._used or another else self._unused_runs + 1
        self._used = False
        if self._unused_runs == RESTLESS and now.versions is not None:
            log.warning("%s: weights change before every call, so that freeze only costs", self.name)


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the items at these positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda args: [args[k] for k in positions]


@functools.cache
def _watch_steps() -> None:
    """From the first fold on, see the steps of optimizers: fused ones do not count what they write."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    written = [p for g in optimizer.param_groups if g.get("fused") for p in g["params"]]
    if written:
        _have_changed(written)


@torch.compiler.disable(reason="a step of a fused optimizer is made known to graphs with frozen weights")
def _have_changed(weights: list[torch.Tensor]) -> None:
    ids = set(map(id, weights))
    for frozen in list(_all):
        frozen.written(ids)


def refresh() -> None:
    """Have every frozen graph of this process fold its weights anew at its next call: for changes that leave
    no trace, through `.data` or a raw pointer."""
    for frozen in list(_all):
        frozen.forget()


__all__ = ["Frozen", "refresh"]
