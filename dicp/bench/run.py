"""Taking the figures. Times in a steady state come from one process for all contestants, which take turns;
compile times and peak memory from a fresh process each."""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dicp import vendor as vendors
from dicp.bench import contestants, measure
from dicp.bench.workloads import DTYPES, Call, Setting, cost, workload
from dicp.compiler import Compiled, observe
from dicp.config import Config, env_names
from dicp.vendor.asking import asked
from dicp.vendor.base import Load

KINDS = ("steady", "compile", "memory", "overhead")
Figures = dict[str, Any]
# Caches that a fresh process is given empty.
CACHES = (*env_names("cache_dir"), "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
WARM_UP = 3


@dataclass(frozen=True)
class Job:
    """What one worker process is to measure."""

    kind: str
    workload: str
    setting: Setting
    contestants: tuple[str, ...]
    rounds: int = 7
    lock: str | None = None
    """A file: times are taken while no other process has it."""

    @staticmethod
    def parse(text: str) -> Job:
        fields = json.loads(text)
        setting = Setting(**fields.pop("setting"))
        return Job(setting=setting, **fields | {"contestants": tuple(fields["contestants"])})

    def text(self) -> str:
        return json.dumps(asdict(self))


def work(job: Job) -> Figures:
    """In the worker process: figures by contestant (and "cost", what a call has to do; "ceilings", what the
    machine can)."""
    for name in job.contestants:
        contestants.get(name).load()
    takers = {"steady": _steady, "compile": _compile, "own": _own, "memory": _memory, "overhead": _overhead}
    return takers[job.kind](job)


def _takes_part(name: str, setting: Setting) -> bool:
    return setting.phase != "training" or contestants.get(name).training is not None


def _difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """|x - y| over |y|."""
    x, y = x.double(), y.double()
    return float((x - y).norm() / y.norm().clamp_min(1e-30))


def _steady(job: Job) -> Figures:
    """Milliseconds of a call, and how far its result is from the first contestant's; on a device other than
    the CPU, what a call takes there without what its host does; with dicp among them, also what
    the machine can do at the most."""
    measured = workload(job.workload)
    found: Figures = {"cost": asdict(cost(measured, job.setting))}
    calls: dict[str, Call] = {}
    first: torch.Tensor | None = None
    for name in job.contestants:
        try:
            call = measured.call(name, job.setting)
            result = call().clone()
            for _ in range(WARM_UP - 1):
                call()
        except Exception as error:  # whatever it is, the others are measured
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            continue
        calls[name] = call
        first = result if first is None else first
        found[name] = {"difference": _difference(result, first)}
    loads = _loads(job) if any(contestants.get(name).is_dicp for name in calls) else {}
    taking = [*calls.values(), *(load.call for load in loads.values())]
    with measure.alone(job.lock):
        turns = measure.turns(taking, job.rounds, wait=job.setting.wait)
        for name, ms in _on_device(calls, job).items():
            found[name]["device_ms"] = ms
    if loads:
        medians = map(statistics.median, turns[len(calls) :])
        rates = {name: load.rate(ms) for (name, load), ms in zip(loads.items(), medians)}
        reads = rates.pop("reading")
        found["ceilings"] = {"gflops": max(rates.values()), "read_gb_per_s": reads}
    for name, seen in zip(calls, turns):
        quartiles = statistics.quantiles(seen, n=4)
        found[name] |= {"ms": statistics.median(seen), "ms_quartiles": [quartiles[0], quartiles[2]]}
    return found


def _on_device(calls: dict[str, Call], job: Job) -> Figures:
    """Median milliseconds of the device for each call, taking turns; none of those that cannot be measured
    without what the host takes."""
    clock = asked(vendors.for_device(job.setting.device)).clock(Config.make())
    if clock is None:
        return {}
    seen: dict[str, list[float]] = {name: [] for name in calls}
    late = set[str]()
    for _ in range(job.rounds):
        for name, call in calls.items():
            seen[name].append(clock(call) * 1e3)
            late |= set() if getattr(clock, "hidden", True) else {name}
    return {name: statistics.median(ms) for name, ms in seen.items() if name not in late}


def _loads(job: Job) -> dict[str, Load]:
    """What shows the most that the machine can do, in turns with the contestants."""
    found = asked(vendors.for_device(job.setting.device)).ceilings(DTYPES[job.setting.dtype])
    if found is None:
        return {}
    arithmetic, reading = found
    return {f"arithmetic {k}": load for k, load in enumerate(arithmetic)} | {"reading": reading}


def _compile(job: Job) -> Figures:
    """Seconds of the first call less a steady one."""
    (name,) = job.contestants
    made = workload(job.workload).call(name, job.setting)

    def call() -> None:
        made()
        job.setting.wait()

    job.setting.wait()
    first = measure.seconds(call)
    steady = statistics.median(measure.seconds(call) for _ in range(3))
    return {name: {"s": max(0.0, first - steady)}}


def _own(job: Job) -> Figures:
    """For dicp: the seconds of a compile that are its own, not Dynamo's or AOTAutograd's. Apart from the
    other compile times: watching a compile keeps its result out of torch's caches."""
    (name,) = job.contestants
    seen: list[Compiled] = []
    call = workload(job.workload).call(name, job.setting)
    with observe(seen.append):
        call()
    return {name: {"own_s": sum(sum(c.seconds.values()) for c in seen)}}


def _memory(job: Job) -> Figures:
    """Megabytes by which a warm call's resident memory peaks above what was there before."""
    (name,) = job.contestants
    call = workload(job.workload).call(name, job.setting)
    for _ in range(WARM_UP):
        call()
    growth = measure.peak_growth_on_gpu if job.setting.device == "cuda" else measure.peak_growth
    (peak,) = measure.peaks([call], growth=growth)
    return {name: {"peak_mb": None if peak is None else peak / 2**20}}


def _overhead(job: Job) -> Figures:
    """Microseconds of a call of three ops on 16 elements; "nothing" is a backend that returns the graph as it
    is. And the rate at which eager reads memory, in GB/s."""

    def three_ops(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + y) * y

    def nothing(gm: Any, example_inputs: Any) -> Any:
        return gm.forward

    x, y = torch.randn(2, 16, device=job.setting.device)
    functions = {name: contestants.get(name).compiler(False)(three_ops) for name in job.contestants}
    functions["nothing"] = torch.compile(three_ops, backend=nothing)
    calls = [functools.partial(f, x, y) for f in functions.values()]
    with torch.no_grad():
        for call in calls:
            call()  # compiles, which the lock is not for
    with torch.no_grad(), measure.alone(job.lock):
        times = measure.alternating(calls, max(job.rounds, 9), wait=job.setting.wait)
    large = torch.ones(2**26, device=job.setting.device)
    (read_ms,) = measure.alternating([large.sum], job.rounds, wait=job.setting.wait)
    return {name: {"us": ms * 1e3} for name, ms in zip(functions, times)} | {
        "read_gb_per_s": large.nbytes / read_ms / 1e6
    }


def in_process(job: Job, caches: str | None = None, timeout: float = 3600.0) -> Figures:
    """A worker's figures; where it dies, each of its contestants has "failed". `caches`: a folder for the
    compilers' caches, instead of where they usually are."""
    own = {} if caches is None else {variable: os.path.join(caches, variable) for variable in CACHES}
    command = [sys.executable, "-m", "dicp.bench", "--worker", job.text()]
    try:
        done = subprocess.run(
            command, env=os.environ | own, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {name: {"failed": f"took more than {timeout:.0f} s"} for name in job.contestants}
    if done.returncode:
        said = done.stderr.strip()[-2000:] or f"exit code {done.returncode}"
        return {name: {"failed": said} for name in job.contestants}
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def _median(seen: Sequence[Figures], key: str) -> float | None:
    values = [f[key] for f in seen if f.get(key) is not None]
    return statistics.median(values) if values else None


def measure_compile(job: Job, repeat: int) -> Figures:
    """Cold: empty caches; warm: a second process, with the caches that the first has filled. Medians over
    `repeat` such pairs."""
    found: Figures = {}
    for name in job.contestants:
        one = Job("compile", job.workload, job.setting, (name,))
        cold, warm = [], []
        for _ in range(repeat):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(in_process(one, folder)[name])
                warm.append(in_process(one, folder)[name])
        found[name] = {"cold_s": _median(cold, "s"), "warm_s": _median(warm, "s")}
        if contestants.get(name).is_dicp:
            with tempfile.TemporaryDirectory() as folder:
                own = Job("own", job.workload, job.setting, (name,))
                found[name]["own_s"] = in_process(own, folder)[name].get("own_s")
        problem = next((f["failed"] for f in cold + warm if "failed" in f), None)
        if problem:
            found[name]["failed"] = problem
    return found


def measure_memory(job: Job, repeat: int) -> Figures:
    """Medians over `repeat` processes."""
    found: Figures = {}
    for name in job.contestants:
        seen = [in_process(Job("memory", job.workload, job.setting, (name,)))[name] for _ in range(repeat)]
        found[name] = {"peak_mb": _median(seen, "peak_mb")}
        problem = next((f["failed"] for f in seen if "failed" in f), None)
        if problem:
            found[name]["failed"] = problem
    return found


def measure_row(kinds: Sequence[str], job: Job, repeat: int) -> Figures:
    """All wanted figures of a workload in a setting, for the contestants that take part."""
    measured = workload(job.workload)
    names = tuple(name for name in job.contestants if _takes_part(name, job.setting))
    job = Job("steady", job.workload, job.setting, names, job.rounds)
    row: Figures = {"workload": job.workload, **asdict(job.setting), "unit": measured.unit}
    row["work"] = measured.amount(job.setting)
    row["contestants"] = {name: {} for name in names}
    parts: list[Figures] = []
    if "steady" in kinds:
        parts.append(in_process(job))
        row |= parts[-1].pop("cost", {}) | parts[-1].pop("ceilings", {})
    compilers = tuple(name for name in names if contestants.get(name).backend is not None)
    if "compile" in kinds:
        parts.append(
            measure_compile(Job("compile", job.workload, job.setting, compilers, job.rounds), repeat)
        )
    if "memory" in kinds:
        parts.append(measure_memory(job, repeat))
    for part in parts:
        for name, figures in part.items():
            row["contestants"][name] |= figures
    return row


def machine() -> Figures:
    """The machine and the versions that figures hold for."""
    from dicp import info

    about = info.collect()
    about |= {"capability": torch.backends.cpu.get_cpu_capability(), "machine_cpus": os.cpu_count()}
    return {k: v for k, v in about.items() if k not in ("vendors", "cache")}
