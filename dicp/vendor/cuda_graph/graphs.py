"""Whole programs as CUDA graphs (mode="reduce-overhead"): one replay instead of many launches.

The first call with given sizes runs directly, the second is captured, later ones replay. What could go
wrong, and what is done about it:
    inputs move       those whose address differed between the two calls are copied into static memory
                      first, the others (weights) are read in place; a late mover costs a new capture
    inputs that are   read in place as well: a backward pass is captured once for each instance of its
    results of        forward pass whose saved values it gets
    another capture
    mutated inputs    a copied one is copied back after the replay
    outputs in use    results live in the graph's memory; while the caller holds those of the last replay,
                      another instance replays (at most INSTANCES), then the program runs directly
    random numbers    torch's default generator is registered with the graph: each replay draws afresh
    streams, threads  captures are kept per device and stream; a call holds the program's lock, a capture one
                      of all programs'
    memory            each capture has a pool of its own, workspaces of cuBLAS in it; what it needs at the
                      most, it keeps. A result is free for the next replay once nobody holds it, whatever
                      `record_stream` was told: copies on other streams are to be waited for
    no capture        sizes read from data, objects that are no tensors, calls that wait: logged once
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp import compat
from dicp.ir import index as ix
from dicp.runtime.marked_tensors import is_marked
from dicp.runtime.program import Program
from dicp.schedule.defs import Buffer, Raw
from dicp.schedule.kernels import Launch
from dicp.vendor.cuda_graph.placement import anchor_of

log = logging.getLogger("dicp")

INSTANCES = 2  # captures of the same sizes: results of one may be held while the other replays
MAX_CAPTURES = 4  # of the same sizes, whichever results of other captures they read
MAX_SIZES = 16  # distinct sizes captured per program
MAX_RECAPTURES = 4  # captures again because an input moved, before all inputs are copied

CAPTURE = threading.Lock()  # torch has one capture at a time in a process
CAPTURE_STREAMS: dict[int, Any] = {}  # by device: torch's own is one of the device that captured first

Call = Callable[[list[Any]], Any]


class CudaBackend:
    """What capturing needs of torch.cuda; tests put a stand-in here."""

    def place(self, device: torch.device) -> tuple[int, int]:
        """The device's index and its current stream."""
        index = device.index if device.index is not None else compat.current_cuda_device()
        return index, compat.raw_stream(index)

    def capturing(self) -> bool:
        """Whether the caller is capturing a graph of his own."""
        return torch.cuda.is_current_stream_capturing()

    def capture(self, run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        """(replay, results) of a function's launches on a device, in memory of their own: what one capture
        has freed may be what another one's results lie in if they share a pool, and any of them replays next.
        Raises RuntimeError where a graph cannot hold them."""
        index, graph, pool = self.place(device)[0], torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with CAPTURE, torch.cuda.device(index):
            before = torch.cuda.current_stream()
            stream = CAPTURE_STREAMS.setdefault(index, torch.cuda.Stream())
            torch.cuda.synchronize()
            compat.forget_cublas_workspaces()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    results = run()
            except RuntimeError:
                self._close(index, pool, stream)
                raise
            finally:
                torch.cuda.set_stream(before)  # a capture whose end fails leaves its own the current one
                compat.forget_cublas_workspaces()
        return graph.replay, results

    def _close(self, index: int, pool: Any, stream: torch.cuda.Stream) -> None:
        """A capture that fails leaves the allocator at it, and torch's generator of random numbers where it
        takes any draw for one of the capture's: one that succeeds brings that back."""
        compat.end_allocations(index, pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=torch.device("cuda", index))

    def users(self, t: torch.Tensor) -> int:
        """Tensors that share t's memory."""
        return compat.storage_users(t)


@dataclass(frozen=True)
class Given:
    """A result that is the input at this position."""

    position: int

    def of(self, args: list[Any]) -> torch.Tensor:
        return args[self.position]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class InputView:
    """A result that is a view of the input at this position, which lies where the caller has it."""

    position: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # elements, from where the input begins in its storage

    def of(self, args: list[Any]) -> torch.Tensor:
        whole: torch.Tensor = args[self.position]
        return whole.as_strided(self.shape, self.strides, self.offset + whole.storage_offset())


@dataclass
class Instance:
    """One capture: how to replay it, the static memory of copied inputs, and its results."""

    replay: Callable[[], None]
    static: dict[int, torch.Tensor]
    chained: tuple[int, ...]  # the addresses of inputs that are results of other captures
    results: Any
    expanded: frozenset[int] = frozenset()  # of the copied inputs
    tensors: list[torch.Tensor] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)  # users of each result when nobody holds it


RESULTS: weakref.WeakValueDictionary[int, Instance] = weakref.WeakValueDictionary()
"""By address, the captures that results there belong to."""


@dataclass
class Sizes:
    """What is known of calls with one set of sizes on one stream."""

    addresses: dict[int, int]  # of the inputs read in place, by position
    copied: set[int]
    chained: list[int] = field(default_factory=list)  # inputs that are results of other captures
    astray: int = 0  # calls in a row in which they were none
    instances: list[Instance] = field(default_factory=list)
    recaptures: int = 0

    def chained_at(self, args: list[Any]) -> tuple[int, ...]:
        """The addresses of inputs that are results of other captures, in this call."""
        return tuple(args[k].data_ptr() for k in self.chained)


def capturing(
    call: Call, program: Program, backend: Any = None, raise_checks: Callable[[], None] | None = None
) -> Call:
    """The program's function, replayed as a CUDA graph from its third call on; itself, when it cannot be."""
    problem = obstacle(program)
    if problem is not None:
        log.warning("%s runs without a CUDA graph: %s", program.name, problem)
        return call
    graphed = Graphed(call, program, backend or CudaBackend(), raise_checks)

    def run(args: list[Any]) -> Any:
        return graphed(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    run.graphed = graphed  # type: ignore[attr-defined]
    return run


def obstacle(program: Program) -> str | None:
    """Why a program cannot be captured, or None."""
    read = {r.name for call in program.python_calls for r in _raws((call.args, call.kwargs))}
    returned = {r.name for r in _raws(program.lowered.outputs)}
    for bound in program.lowered.inputs:  # a generator that nobody draws from is no obstacle
        if isinstance(bound, Raw) and bound.name in read | returned:
            return f"input {bound.name} is not a plain tensor, or not on the GPU"
    given = {n for b in program.lowered.inputs for n in _sizes(b)}
    for call in program.python_calls:
        if any(isinstance(r, ix.Poly) or _sizes(r) - given for r in call.results):
            return f"{call.node.target} gives a size that depends on data ({call.note})"
        if any(isinstance(r, Raw) for r in call.results):
            return f"{call.node.target} gives what is not a plain tensor, or not on the GPU ({call.note})"
    if not program.items:
        return "there is nothing to launch"
    return None


def _raws(x: Any) -> list[Raw]:
    """Every Raw inside a nested argument structure."""
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, (list, tuple)):
        return [r for a in x for r in _raws(a)]
    return [x] if isinstance(x, Raw) else []


def _sizes(bound: Any) -> set[ix.Atom]:
    """The size symbols of an input or result."""
    indices = (*bound.shape, *bound.strides) if isinstance(bound, Buffer) else (bound,)
    return {a for i in indices if isinstance(i, (int, ix.Poly)) for a in ix.atoms(i)}


def mutated_inputs(program: Program) -> set[int]:
    """Positions of the inputs that the program writes, by kernels or by calls."""
    written: set[str] = set()
    for item in program.items:
        names = item.writes if isinstance(item, Launch) else [b.name for b in item.outputs if b is not None]
        written.update(map(program.plan.find, names))
    return {k for k, b in enumerate(program.lowered.inputs) if isinstance(b, Buffer) and b.name in written}


class Graphed:
    """See the head of this file."""

    def __init__(
        self, call: Call, program: Program, backend: Any, raise_checks: Callable[[], None] | None
    ) -> None:
        self.call, self.program, self.backend, self.raise_checks = call, program, backend, raise_checks
        self.mutated = mutated_inputs(program)
        inputs = list(enumerate(program.lowered.inputs))
        self.tensors = [k for k, b in inputs if isinstance(b, Buffer)]
        self.numbers = [k for k, b in inputs if not isinstance(b, (Buffer, Raw))]
        self.varying = [
            k
            for k, b in inputs
            if isinstance(b, Buffer) and not all(isinstance(n, int) for n in (*b.shape, *b.strides))
        ]
        self.marked = [
            k for k, b in inputs if isinstance(b, Buffer) and b.name in program.lowered.marked
        ]
        self.anchor = anchor_of(program.lowered)
        self.sizes: dict[Any, Sizes] = {}
        self.stopped: str | None = None
        self.lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Any:
        if self.stopped is not None or self.backend.capturing():
            return self.call(args)
        with self.lock:
            return self._call(args)

    def _call(self, args: list[Any]) -> Any:
        if self.anchor is None:
            return self.call(args)
        if any(is_marked(args[k]) for k in self.marked):
            log.info("%s runs this call without a CUDA graph: an input is conjugated", self.program.name)
            return self.call(args)
        device = args[self.anchor].device
        place = self.backend.place(device)
        key = (
            place,
            *(args[k] for k in self.numbers),
            *((args[k].shape, args[k].stride()) for k in self.varying),
        )
        known = self.sizes.get(key)
        if known is None:
            if len(self.sizes) < MAX_SIZES:
                self._remember(key, args, device)
            return self.call(args)
        moved = {k for k, at in known.addresses.items() if args[k].data_ptr() != at}
        if moved:
            self._find_out(known, moved, args)
        instance = self._idle_instance(known, args)
        if instance is None and not self._astray(known, args):
            instance = self._capture(known, args, device)
        return self._replay(instance, args) if instance is not None else self.call(args)

    def _remember(self, key: Any, args: list[Any], device: torch.device) -> None:
        elsewhere = {k for k in self.tensors if args[k].device != device}
        addresses = {k: args[k].data_ptr() for k in self.tensors if k not in elsewhere}
        self.sizes[key] = Sizes(addresses, elsewhere)

    def _find_out(self, known: Sizes, moved: set[int], args: list[Any]) -> None:
        """Inputs are not where they were: results of captures come to a few places, others to any."""
        results = {k for k in moved if args[k].data_ptr() in RESULTS}
        if moved - results:
            self._copy_from_now_on(known, moved - results)
        if results - known.copied:
            known.instances.clear()
            known.chained = sorted({*known.chained, *results} - known.copied)
            known.addresses = {k: at for k, at in known.addresses.items() if k not in results}

    def _astray(self, known: Sizes, args: list[Any]) -> bool:
        """Whether inputs that are results of captures otherwise are none now, and this call is to run
        directly: the capture that they come from has. They are copied when that goes on."""
        astray = {k for k in known.chained if args[k].data_ptr() not in RESULTS}
        known.astray = known.astray + 1 if astray else 0
        if known.astray > MAX_RECAPTURES:
            self._copy_from_now_on(known, astray)
            return False
        return bool(astray)

    def _copy_from_now_on(self, known: Sizes, moved: set[int]) -> None:
        known.recaptures += bool(known.instances)
        known.instances.clear()
        if known.recaptures > MAX_RECAPTURES:
            moved = set(self.tensors)
        known.copied |= moved
        known.addresses = {k: at for k, at in known.addresses.items() if k not in known.copied}
        known.chained = [k for k in known.chained if k not in known.copied]

    def _idle_instance(self, known: Sizes, args: list[Any]) -> Instance | None:
        chained = known.chained_at(args)
        for instance in known.instances:
            if instance.chained != chained:
                continue
            if [self.backend.users(t) for t in instance.tensors] == instance.idle:
                known.astray = 0
                return instance
        return None

    def _capture(self, known: Sizes, args: list[Any], device: torch.device) -> Instance | None:
        chained = known.chained_at(args)
        known.instances = [i for i in known.instances if all(at in RESULTS for at in i.chained)]
        alike = sum(instance.chained == chained for instance in known.instances)
        if alike >= INSTANCES:
            return None
        if len(known.instances) >= MAX_CAPTURES:
            known.recaptures += 1
            if known.recaptures > MAX_RECAPTURES:
                return None
            del known.instances[0]
        static = {
            k: torch.empty_strided(args[k].shape, args[k].stride(), dtype=args[k].dtype, device=device)
            for k in sorted(known.copied)
        }
        for k, t in static.items():
            stored(t).copy_(stored(args[k]))
        given = [static.get(k, a) for k, a in enumerate(args)]
        try:
            replay, results = self.backend.capture(lambda: self.call(list(given)), device)
        except RuntimeError as e:
            self.stopped = str(e).splitlines()[0]
            log.warning(
                "%s runs without a CUDA graph: the capture failed: %s", self.program.name, self.stopped
            )
            self.sizes.clear()
            return None
        in_place = {given[k].untyped_storage().data_ptr(): k for k in self.tensors if k not in static}
        kept = _kept(_flat(results), given, in_place)
        expanded = frozenset(k for k, t in static.items() if stored(t) is not t)
        made = Instance(replay, static, chained, kept, expanded)
        made.tensors = [
            t for t in kept if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in in_place
        ]
        del results
        made.idle = [self.backend.users(t) for t in made.tensors]
        known.instances.append(made)
        RESULTS.update((t.data_ptr(), made) for t in made.tensors)
        return made

    def _replay(self, instance: Instance, args: list[Any]) -> Any:
        if self.raise_checks is not None:
            self.raise_checks()
        for k, t in instance.static.items():
            if args[k].is_cpu and not t.is_cpu:  # a number, whose memory may be pinned, and written again
                t.fill_(args[k].item())
            else:
                source = args[k]
                if k in instance.expanded:
                    t, source = stored(t), stored(source)
                t.copy_(source, non_blocking=True)
        instance.replay()
        for k in self.mutated & set(instance.static):
            args[k].copy_(instance.static[k], non_blocking=True)
        out = tuple(_result(r, args) for r in instance.results)
        args.clear()
        return out


def _result(r: Any, args: list[Any]) -> Any:
    """What a call returns: a tensor of its own on the memory of the capture, or of an input."""
    if isinstance(r, (Given, InputView)):
        return r.of(args)
    return r.detach() if isinstance(r, torch.Tensor) else r


def stored(t: torch.Tensor) -> torch.Tensor:
    """A tensor without repetitions of what it expands, which nothing can be copied to."""
    for dim, (size, stride) in enumerate(zip(t.shape, t.stride())):
        t = t.narrow(dim, 0, 1) if size > 1 and stride == 0 else t
    return t


def _flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _kept(results: list[Any], given: list[Any], in_place: dict[int, int]) -> list[Any]:
    """What an instance keeps of its results: inputs, and views of those that lie where the caller has them,
    are made of each call's own, and not held on to. in_place: positions of those by their storages."""
    whole = {id(a): k for k, a in enumerate(given) if isinstance(a, torch.Tensor)}
    kept: list[Any] = []
    for r in results:
        at = in_place.get(r.untyped_storage().data_ptr()) if isinstance(r, torch.Tensor) else None
        if id(r) in whole:
            kept.append(Given(whole[id(r)]))
        elif at is not None and r.dtype == given[at].dtype and not is_marked(r):
            begin = int(r.storage_offset()) - int(given[at].storage_offset())
            kept.append(InputView(at, tuple(r.shape), r.stride(), begin))
        else:
            kept.append(r)
    return kept
