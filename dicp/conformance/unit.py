"""One unit of work: all cases of one operator and dtype, compiled together and compared one by one."""

from __future__ import annotations

import dataclasses
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dicp.errors import DicpError

from . import cases as cases_
from . import opdb
from .cases import Case, Mode, put_tensors
from .outcome import Mismatch, Outcome, call, compare, flatten, gradients, target

SEED = 1234
SEEDS = 8  # a few coin flips may agree under two seeds; under eight they do not
DYNAMIC_GROUP = 8  # cases per dynamic compile: guards between many symbols cost more than compiles
NUMBER = re.compile(r"\d+(?:\.\d*)?(?:e[+-]?\d+)?")
REFUSED = Outcome("", (), ())  # of a call that raises
SAME_ERROR_ENOUGH = 3  # singles failing alike before the rest of a failing half is taken to fail alike


@dataclass(frozen=True)
class Unit:
    """What a worker is told to run."""

    op: str
    dtype: str
    mode: Mode
    dynamic: bool
    samples: int
    device: str = "cpu"
    only: str | None = None

    @property
    def key(self) -> str:
        """`add|float32|forward|static`"""
        return f"{self.op}|{self.dtype}|{self.mode}|{'dynamic' if self.dynamic else 'static'}"


@dataclass
class CaseResult:
    """status: pass | fail | skip | upstream.

    upstream: `aot_eager`, which is Dynamo and AOTAutograd without any compiler, fails in the same way; or the
    strides that differ from eager's are those that the operator's own fake implementation promises.
    """

    id: str
    status: str
    check: str = ""
    message: str = ""
    call: str = ""


@dataclass
class UnitResult:
    """What a worker tells back.

    graphs: how many graphs Dynamo handed over; kernels, library, extern: `counters["dicp"]` of this unit;
    externs: aten overload -> calls; ms: wall time of the compiled calls, compiling included.
    """

    key: str
    cases: list[CaseResult] = field(default_factory=list)
    graphs: int = 0
    kernels: int = 0
    library: int = 0
    extern: int = 0
    externs: dict[str, int] = field(default_factory=dict)
    ms: float = 0.0
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data for one JSON line."""
        return asdict(self)


def from_json(data: dict[str, Any]) -> UnitResult:
    """The inverse of `to_json`."""
    return UnitResult(**{**data, "cases": [CaseResult(**c) for c in data["cases"]]})


def dtype_named(name: str) -> torch.dtype:
    """`float32` -> torch.float32"""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no such dtype: {name!r}")
    return found


def source(op: opdb.Operator, group: Sequence[Case], gradient: bool) -> tuple[str, dict[str, Any]]:
    """Python text of a function that makes every call of the group, and the names it uses.

    Text and not a closure: arguments that are no tensors become literals, so that they stay constants for
    Dynamo as they are in a user's model, and the text is what a report can show.
    """
    constants: dict[str, Any] = {}
    lines, at = ["def f(t):"], 0
    for i, case in enumerate(group):
        first = at

        def slot(k: int, case: Case = case, first: int = first) -> str:
            clone = case.inplace and gradient and k == 0 and case.tensors[0].requires_grad
            return f"t[{first + k}]" + (".clone()" if clone else "")

        lines.append(
            f"    r{i} = {'inplace' if case.inplace else 'op'}({cases_.call_source(case, constants, slot)})"
        )
        at += len(case.tensors)
    lines.append(f"    return ({', '.join(f'r{i}' for i in range(len(group)))},)")
    return "\n".join(lines), {**constants, "torch": torch, "op": op.call, "inplace": op.inplace}


class Runner:
    """Compiles and compares groups of cases of one operator for one backend."""

    def __init__(self, backend: str, op: opdb.Operator, mode: Mode, dynamic: bool) -> None:
        self.backend, self.op, self.gradient, self.dynamic = backend, op, mode == "gradient", dynamic

    def eager(self, case: Case, seed: int = SEED) -> Outcome:
        """The case's eager outcome; raises what the operator raises."""
        return call(self.op, case, self.fresh(case), self.gradient, seed)

    def fresh(self, case: Case) -> list[torch.Tensor]:
        """New copies of the case's tensors."""
        return [cases_.copy_exactly(t) for t in case.tensors]

    def compiled(self, group: Sequence[Case]) -> list[Outcome]:
        """The outcomes of one compiled call that makes all the group's calls.

        Dynamic: called twice, with the sizes of the cases and with grown ones; the second outcomes follow the
        first.
        """
        text, names = source(self.op, group, self.gradient)
        exec(compile(text, f"<conformance {self.op.name}>", "exec"), names)
        torch._dynamo.reset()
        fn = torch.compile(names["f"], backend=self.backend, dynamic=self.dynamic)
        outcomes = self._call(fn, group, [self.fresh(c) for c in group])
        if self.dynamic:
            again = [c for c in group if c.resized is not None]
            if len(again) == len(group):
                outcomes += self._call(fn, group, [self.fresh(grow(c)) for c in group])
        return outcomes

    def _call(
        self, fn: Callable[..., Any], group: Sequence[Case], inputs: list[list[torch.Tensor]]
    ) -> list[Outcome]:
        torch.manual_seed(SEED)
        with torch.set_grad_enabled(self.gradient):
            results = fn([t for ts in inputs for t in ts])
        # One backward call for the whole group: it is one graph, and its parts do not touch.
        grads: list[tuple[torch.Tensor | None, ...]] = [() for _ in group]
        if self.gradient:
            grads = self._gradients(results, group, inputs)
        out = []
        for result, given, grad in zip(results, inputs, grads, strict=True):
            structure, leaves = flatten(result)
            out.append(Outcome(structure, leaves, tuple(given), grad))
        return out

    def _gradients(
        self, results: Sequence[Any], group: Sequence[Case], inputs: list[list[torch.Tensor]]
    ) -> list[tuple[torch.Tensor | None, ...]]:
        flat = [t for ts in inputs for t in ts]
        joint = gradients(
            list(results), lambda rs: [c.process(r) for c, r in zip(group, rs, strict=True)], flat
        )
        it = iter(joint)
        return [tuple(next(it) for _ in ts) for ts in inputs]

    def fake_strides(self, case: Case, actual: Outcome) -> list[tuple[int, ...]] | None:
        """The result's strides by the operator's fake implementation: all that a compiler is told of them.
        Sizes that depend on data are those of the actual result.
        """
        with FakeTensorMode(shape_env=ShapeEnv()) as mode, torch.set_grad_enabled(self.gradient):
            try:
                faked = [mode.from_tensor(t, static_shapes=True) for t in case.tensors]
                args, kwargs = put_tensors(case.args, faked), put_tensors(case.kwargs, faked)
                leaves = flatten(target(self.op, case)(*args, **kwargs))[1]
                return promised_strides(leaves, actual.leaves)
            except Exception:  # data-dependent sizes, leaves written in place...: nothing is promised
                return None

    def judge(self, case: Case, eager: Outcome, actual: Outcome) -> Mismatch | None:
        """Compare, with the random operators' rule: same stream as eager, or else nothing but the
        metadata.
        """
        wrong = compare(self.op, case, eager, actual, self.gradient, lambda: self.fresh(case), SEED)
        if wrong is None or wrong.check not in ("value", "gradient", "mutation"):
            return wrong
        # Another seed gives another result: a random operator. Distributions are test/op/test_random.py's.
        for seed in range(SEED + 1, SEED + 1 + SEEDS):
            again = compare(
                self.op, case, eager, self.eager(case, seed), self.gradient, lambda: self.fresh(case), SEED
            )
            if again is not None and again.check == wrong.check:
                return None
        return wrong


def grow(case: Case) -> Case:
    """The case with its second set of sizes."""
    assert case.resized is not None
    return Case(f"{case.id}:resized", case.args, case.kwargs, case.resized, case.inplace, case.process)


def device_lost(device: str) -> bool:
    """Whether a kernel has gone astray, after which all that this process asks of the device fails."""
    if device == "cpu":
        return False
    try:
        torch.accelerator.synchronize()
    except RuntimeError:
        return True
    return False


def first_line(e: BaseException) -> str:
    """`RuntimeError: first lines of its message (file.py:12 function)`, short enough for a table."""
    cause = getattr(e, "inner_exception", None) or e
    lines = [line.strip() for line in str(cause).strip().splitlines() if line.strip()]
    kept = [line for line in lines if "TORCHDYNAMO_VERBOSE" not in line][:3]
    kept += [line for line in lines if "error:" in line and line not in kept][:1]
    frames = traceback.extract_tb(cause.__traceback__)
    where = (
        f" ({'/'.join(frames[-1].filename.split('/')[-2:])}:{frames[-1].lineno} {frames[-1].name})"
        if frames
        else ""
    )
    return f"{type(cause).__name__}: {' | '.join(kept)}"[:600] + where


def run_group(
    runner: Runner, group: list[tuple[Case, Outcome]], limit: list[str] | None = None
) -> list[CaseResult]:
    """Results of a group; a group that raises is halved until the guilty cases are alone. Those that have to
    raise are alone from the first."""
    limit = [] if limit is None else limit
    refusals = [_refusal(runner, case) for case, _ in group if case.refused]
    if refusals:
        others = [pair for pair in group if not pair[0].refused]
        return refusals + (run_group(runner, others, limit) if others else [])
    try:
        outcomes = runner.compiled([c for c, _ in group])
    except Exception as e:  # whatever a compiler raises is a finding
        why = first_line(e)
        if len(group) == 1:
            case = group[0][0]
            limit.append(why)
            return [CaseResult(case.id, "fail", "error", why, cases_.show(runner.op, case))]
        if limit.count(why) >= SAME_ERROR_ENOUGH:
            forms = [[pair for pair in group if pair[0].inplace is form] for form in (False, True)]
            if all(forms):  # often it is the in-place form alone that cannot be compiled
                return [r for part in forms for r in run_group(runner, part, limit)]
            return [
                CaseResult(c.id, "fail", "error", f"(not isolated) {why}", cases_.show(runner.op, c))
                for c, _ in group
            ]
        middle = len(group) // 2
        return run_group(runner, group[:middle], limit) + run_group(runner, group[middle:], limit)
    results = []
    for (case, eager), actual in zip(group, outcomes, strict=False):
        results.append(_verdict(runner, case, runner.judge(case, eager, actual), actual))
    for (case, _), actual in zip(group, outcomes[len(group) :], strict=False):
        larger = grow(case)
        results.append(_verdict(runner, larger, runner.judge(larger, runner.eager(larger), actual), actual))
    return results


def _refusal(runner: Runner, case: Case) -> CaseResult:
    """Whether the compiled call raises as well: while it runs, or is traced, but not while it is compiled."""
    shown = cases_.show(runner.op, case)
    try:
        runner.compiled([case])
    except BackendCompilerFailed as e:
        return CaseResult(case.id, "fail", "error", first_line(e), shown)
    except DicpError as e:  # one of ours tells of the compiler, not of the operator's arguments
        return CaseResult(case.id, "fail", "error", first_line(e), shown)
    except (IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError):
        return CaseResult(case.id, "pass")  # not promised: which; of a divisor eager raises RuntimeError
    return CaseResult(case.id, "fail", "refusal", "eager raises, the compiled call does not", shown)


def _verdict(runner: Runner, case: Case, wrong: Mismatch | None, actual: Outcome) -> CaseResult:
    if wrong is None:
        return CaseResult(case.id, "pass")
    result = CaseResult(case.id, "fail", wrong.check, wrong.message, cases_.show(runner.op, case))
    if wrong.check == "stride" and strides_of(actual.leaves) == runner.fake_strides(case, actual):
        result.status = "upstream"
        result.message = f"torch's own fake implementation promises these strides: {wrong.message}"
    return result


def strides_of(leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """The strides of the tensors among them."""
    return [t.stride() for t in leaves if isinstance(t, torch.Tensor)]


def promised_strides(faked: Sequence[Any], actual: Sequence[Any]) -> list[tuple[int, ...]]:
    """Strides of fake results, with the actual results' sizes in the place of symbols."""
    pairs = [(f, a) for f, a in zip(faked, actual, strict=True) if isinstance(f, torch.Tensor)]
    known = {
        n.node.expr: size
        for f, a in pairs
        for n, size in zip(f.shape, a.shape, strict=True)
        if isinstance(n, torch.SymInt)
    }
    return [
        tuple(int(s.node.expr.subs(known)) if isinstance(s, torch.SymInt) else s for s in f.stride())
        for f, _ in pairs
    ]


def prepare(runner: Runner, cases: Iterable[Case]) -> tuple[list[tuple[Case, Outcome]], list[CaseResult]]:
    """Eager outcomes; a call that eager refuses is skipped, as are grown sizes that it refuses, and a call
    that it should refuse and does not."""
    ready, skipped = [], []
    for case in cases:
        try:
            eager = runner.eager(case)
            if case.refused:
                skipped.append(CaseResult(case.id, "skip", "eager", "eager does not refuse it"))
                continue
            if runner.gradient and all(g is None for g in eager.grads):
                raise ValueError("no gradient reaches an input")
        except Exception as e:  # what eager refuses is no case, but where that is the case
            if case.refused:
                ready.append((case, REFUSED))
                continue
            skipped.append(CaseResult(case.id, "skip", "eager", first_line(e)))
            continue
        if case.resized is not None:
            try:
                runner.eager(grow(case))
            except Exception:  # fixed sizes in the arguments: no second sizes
                case = Case(case.id, case.args, case.kwargs, case.tensors, case.inplace, case.process)
        ready.append((case, eager))
    return ready, skipped


def run_unit(
    unit: Unit,
    backend: str,
    progress: Callable[[dict[str, Any]], None] | None = None,
    isolate: bool = False,
    skip: Sequence[str] = (),
) -> UnitResult:
    """Run every case of the unit.

    isolate: one compile per case, each announced by `progress` before it starts, so that whoever watches this
    process knows which case killed it; skip: cases not to run again.
    """
    op, dtype = opdb.find(unit.op, unit.device), dtype_named(unit.dtype)
    result = UnitResult(unit.key)
    runner = Runner(backend, op, unit.mode, unit.dynamic)
    cases = cases_.build(op, dtype, unit.mode, unit.samples, unit.dynamic)
    cases = [c for c in cases if c.id not in skip and (unit.only is None or c.id == unit.only)]
    tell = progress or (lambda message: None)
    ready: list[tuple[Case, Outcome]] = []
    if not isolate:
        ready, skipped = prepare(runner, cases)
        result.cases += skipped
    before = _counters()
    started = time.perf_counter()
    if isolate:
        for case in cases:
            tell({"eager": case.id})
            found, skipped = prepare(runner, [case])
            tell({"starts": case.id})
            done = skipped + run_group(runner, found) if found else skipped
            ready += found
            result.cases += done
            tell({"done": [asdict(d) for d in done]})
    elif ready:
        result.cases += _in_groups(runner, unit, ready)
        if _counters()["graphs"] == before["graphs"] and unit.dynamic is False:
            # Dynamo leaves these in Python by default; a user may ask it not to, so the backend must be
            # ready.
            with torch._dynamo.config.patch(
                capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
            ):
                captured = [(dataclasses.replace(c, id=f"{c.id}:captured"), e) for c, e in ready]
                result.cases += _in_groups(runner, unit, captured)
    result.ms = (time.perf_counter() - started) * 1e3
    _count(result, before)
    if backend != "aot_eager":
        _blame_upstream(result, unit, ready)
    torch._dynamo.reset()
    return result


def _in_groups(runner: Runner, unit: Unit, ready: list[tuple[Case, Outcome]]) -> list[CaseResult]:
    results = []
    # Second sizes need a whole group that has them.
    for group in ([r for r in ready if r[0].resized is None], [r for r in ready if r[0].resized is not None]):
        size = DYNAMIC_GROUP if unit.dynamic else max(len(group), 1)
        for at in range(0, len(group), size):
            results += run_group(runner, group[at : at + size])
    return results


def _blame_upstream(result: UnitResult, unit: Unit, ready: list[tuple[Case, Outcome]]) -> None:
    """Failures that Dynamo and AOTAutograd produce without us are not the vendor's."""
    failing = {c.id: c for c in result.cases if c.status == "fail"}
    plain = Runner("aot_eager", opdb.find(unit.op, unit.device), unit.mode, unit.dynamic)
    again = [r for r in ready if r[0].id in failing or f"{r[0].id}:resized" in failing]
    captured = [
        (dataclasses.replace(c, id=f"{c.id}:captured"), e) for c, e in ready if f"{c.id}:captured" in failing
    ]
    theirs_all = run_group(plain, again) if again else []
    if captured:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
            theirs_all += run_group(plain, captured)
    for theirs in theirs_all:
        mine = failing.get(theirs.id)
        if mine is not None and theirs.status == "fail" and same_fault(mine, theirs):
            mine.status = "upstream"
            mine.message = f"aot_eager too: {theirs.message}"


def same_fault(mine: CaseResult, theirs: CaseResult) -> bool:
    """Whether two backends fail alike: an error's first words, or a difference in nearly the same numbers."""
    texts = [c.message.removeprefix("(not isolated) ") for c in (mine, theirs)]
    words, others = (NUMBER.sub("#", t) for t in texts)
    if mine.check != theirs.check or words[:60] != others[:60]:
        return False
    pairs = zip(*(map(float, NUMBER.findall(t)) for t in texts))
    return (
        mine.check == "error" or words == others and all(math.isclose(a, b, rel_tol=0.02) for a, b in pairs)
    )


def _counters() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {**counters["dicp"], "graphs": counters["stats"]["unique_graphs"]}


def _count(result: UnitResult, before: dict[str, int]) -> None:
    now = {k: v - before.get(k, 0) for k, v in _counters().items()}
    result.graphs, result.kernels, result.library, result.extern = (
        now.get(k, 0) for k in ("graphs", "kernels", "library", "extern")
    )
    result.externs = {k.removeprefix("extern:"): v for k, v in now.items() if k.startswith("extern:") and v}
