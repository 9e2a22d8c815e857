"""The whole way from an FX graph to a callable, on one page."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from dicp.config import Config
from dicp.errors import VendorError
from dicp.ir.verify import verify
from dicp.ops.library import register
from dicp.passes import run_passes
from dicp.passes.freeze import Folding, mark_frozen, split_frozen
from dicp.runtime.dump import Dump
from dicp.runtime.frozen import Frozen
from dicp.runtime.parts import assemble_parts
from dicp.runtime.program import Program, ResultMemory, make_program
from dicp.runtime.progress import Progress
from dicp.runtime.verification import Checked, Verified, results_due
from dicp.schedule.defs import Buffer, Lowered
from dicp.schedule.fuse import fuse
from dicp.schedule.kernels import build_kernels
from dicp.schedule.lower import lower
from dicp.schedule.memory import plan_memory
from dicp.schedule.partition import partition
from dicp.tuning.choose import choose_claims
from dicp.vendor.asking import asked, fingerprint, has
from dicp.vendor.base import AnyVendor, Vendor, VendorBase, takes_graphs

_numbers = itertools.count()
_observers: list[Callable[[Compiled], None]] = []


@dataclass(eq=False)
class Compiled:
    """A compiled graph, and what `explain` tells of it. Where weights are frozen, `program` is the main one,
    and `constants` has the one that computes what depends on weights alone (passes/freeze.py)."""

    name: str
    role: str
    call: Callable[[list[Any]], Any]
    program: Program
    seconds: dict[str, float] = field(default_factory=dict)
    constants: Compiled | None = None
    folding: Folding | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many kernels, library calls and externs the program has, of each extern by name, and how many
        values are folded."""
        program = self.program
        externs = Counter(f"extern:{call.node.target}" for call in program.externs)
        return {
            "kernels": len(program.launches),
            "library": len(program.library_calls),
            "extern": len(program.externs),
            **externs,
            **({} if self.folding is None else {"folded": len(self.folding.forms)}),
        }


def compile_graph(
    gm: fx.GraphModule,
    vendor: AnyVendor,
    config: Config,
    role: str = "inference",
    weights: Mapping[int, str] | None = None,
) -> Compiled:
    """Compile an aten graph (functional, with fake values in meta["val"]) for a vendor.

    role: inference, forward or backward, for names and reports. weights: names of the inputs to freeze, by
    position.
    Raises UnsupportedOp (strict mode), BuildError, ToolchainError, VerifyError.
    """
    register()
    if not has(vendor, VendorBase.load):  # of others, keys are made of it
        fingerprint(asked(vendor), config)
    name = f"graph{next(_numbers)}_{role}"
    mark_frozen(gm, weights or {})
    with Progress(name) as progress:
        kept: ResultMemory = "saved" if role == "forward" else "kept"
        results = kept if config.keep_results else "new"
        label = f"{vendor.name}: {name}"
        verified = Verified(label, vendor.name, gm, owned=role == "backward") if config.verify else None
        compiled = _compile(gm, _Job(name, role, asked(vendor), config, progress, results))
        if verified is not None:
            verified.call, compiled.call = compiled.call, verified
    for observer in list(_observers):
        observer(compiled)
    return compiled


@dataclass
class _Job:
    """What the steps of one compile share."""

    name: str
    role: str
    vendor: AnyVendor
    config: Config
    progress: Progress
    results: ResultMemory
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dump = Dump(self.name, self.config)
        self.step = _timer(self.seconds, self.progress)


def _compile(gm: fx.GraphModule, job: _Job) -> Compiled:
    job.dump.graph("00_import", gm)
    with job.step("passes"):
        gm = run_passes(gm, job.vendor, job.config, job.dump.on_pass)
        split = split_frozen(gm)
    if split is None:
        return _build(gm, job)
    job.dump.graph("29_split", gm)
    alone = dataclasses.replace(job, name=f"{job.name}_constants", results="new", seconds={})
    constants = _build(split[0], alone)
    return _with_constants(_build(gm, job), constants, split[1], job.vendor)


def _build(gm: fx.GraphModule, job: _Job) -> Compiled:
    name, vendor, config, dump, step = job.name, job.vendor, job.config, job.dump, job.step
    if config.verify:
        verify(gm)
    if takes_graphs(vendor):
        with step("partition"):
            parts = partition(gm, lambda node: vendor.supports(node.target, node))
        with step("build"):
            program, call = assemble_parts(name, gm, parts, vendor, config)
        return _done(Compiled(name, job.role, call, program, job.seconds), dump)
    with step("choose"):
        claims = choose_claims(gm, vendor, config, lambda one, its: _compile_one(one, vendor, config, its))
    with step("lower"):
        lowered = lower(gm, vendor, config, claims)
    dump.definitions("30_lowered", lowered)
    with vendor.begin(lowered, config) as begun:
        with step("fuse"):
            steps = fuse(lowered)
        with step("kernels"):
            items = build_kernels(steps, lowered)
        dump.items("40_kernels", items)
        with step("memory"):
            owned, saved = _kept_inputs(lowered) if job.role == "backward" else (frozenset(), frozenset())
            plan = plan_memory(items, lowered, owned)
        program = make_program(name, lowered, items, plan, owned, job.results, saved)
        program.begun = begun
        dump.plan("50_memory", program)
        with step("build"):
            call = _assembled(vendor, program, config, gm)
        program.begun = None
    return _done(Compiled(name, job.role, call, program, job.seconds), dump)


def _assembled(
    vendor: Vendor, program: Program, config: Config, gm: fx.GraphModule
) -> Callable[[list[Any]], Any]:
    """The vendor's function, which takes one list (AOTAutograd unpacks what is not marked so). What one gives
    that dicp did not make is checked: `Runner` returns planned memory."""
    program.verify = config.verify
    call = vendor.assemble(program, config)
    if not callable(call):
        raise VendorError(f"{vendor.name}.assemble gave {call!r}, which is no function of a list of inputs")
    if getattr(call, "_boxed_call", False):
        return call

    boxed = Checked(call, results_due(gm), f"{vendor.name}: {program.name}")
    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _with_constants(main: Compiled, constants: Compiled, folding: Folding, vendor: AnyVendor) -> Compiled:
    """A graph whose weights are frozen, of its two programs."""
    main.constants, main.folding = constants, folding
    for what, seconds in constants.seconds.items():
        main.seconds[what] = main.seconds.get(what, 0.0) + seconds
    main.call = Frozen(main.name, main.call, constants.call, folding, vendor.pack)
    save_main, save_constants = main.program.save, constants.program.save
    if save_main is None or save_constants is None:
        main.program.save = None
    else:
        main.program.save = lambda: save_main().with_constants(save_constants(), folding)
    return main


def _kept_inputs(lowered: Lowered) -> tuple[frozenset[str], frozenset[str]]:
    """The inputs of a backward that nobody else holds, all but the forward's own, and those that autograd
    kept for it, all but gradients; by the names that AOTAutograd gives them."""
    names = [b.name for b in lowered.inputs if isinstance(b, Buffer)]
    owned = frozenset(n for n in names if not n.startswith("primals_"))
    return owned, frozenset(n for n in names if not n.startswith("tangents_"))


def _compile_one(
    gm: fx.GraphModule, vendor: Vendor, config: Config, claims: dict[fx.Node, Any]
) -> Callable[[list[Any]], Any]:
    """The way from here on, for the graph of one call that is to be measured."""
    plain = dataclasses.replace(config, debug=0, dump=None)
    lowered = lower(gm, vendor, plain, claims)
    with vendor.begin(lowered, plain) as begun:
        items = build_kernels(fuse(lowered), lowered)
        program = make_program("candidate", lowered, items, plan_memory(items, lowered))
        program.begun = begun
        call = _assembled(vendor, program, plain, gm)
        program.begun = None
    return call


def _done(compiled: Compiled, dump: Dump) -> Compiled:
    dump.sources(compiled.program)
    dump.done(compiled)
    return compiled


@contextlib.contextmanager
def observe(observer: Callable[[Compiled], None]) -> Iterator[None]:
    """Call `observer` with every graph compiled inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def watched() -> bool:
    """Whether somebody observes compiles, so that results must come from one and not from a cache."""
    return bool(_observers)


def _timer(
    seconds: dict[str, float], progress: Progress
) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def step(name: str) -> Iterator[None]:
        progress.step = name
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start

    return step
