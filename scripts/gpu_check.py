"""Conformance, models and measurements of dicp_cuda on a GPU; see gpu_check.sh.

What compiles runs side by side, what is timed one after the other: each process that measures waits for a
lock, which is free once all that belong to its part are ready. Results are written as they come, so that what
hangs, or has no time left, costs its own lines only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("llama", "bert", "gpt2", "vit", "resnet50")
PARTS = ("inference", "tuned", "compile", "training")
DECODING = "llama_7b-decode"
DECODERS = ("inductor-graphs", "dicp_cuda", "dicp_cuda-graphs")  # of 13.5 GB each
BATCH = {"inference": 16, "training": 8}  # times what the CPU's benchmark has
DTYPES = ("float32", "bfloat16", "float16", "int64")
TUNED = ("inductor-graphs-max-autotune", "dicp_cuda-graphs", "dicp_cuda-graphs-max-autotune")
Found = dict[str, Any]


class Report:
    """The results so far, in a file after each."""

    def __init__(self, out: Path, seconds: float, models: Sequence[str] = MODELS) -> None:
        self.out, self.end, self.models = out, time.monotonic() + seconds, tuple(models)
        self.parts: dict[str, Any] = {"environment": environment()}

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def add(self, part: str, found: Any) -> None:
        known = self.parts.get(part, [] if isinstance(found, list) else None)
        self.parts[part] = known + found if isinstance(known, list) else found
        (self.out / "gpu_check.json").write_text(json.dumps(self.parts, indent=1) + "\n")
        (self.out / "gpu_check.md").write_text(page(self.parts))


def environment() -> Found:
    import torch
    import triton

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "processors": len(os.sched_getaffinity(0)),
        "commit": commit.stdout.strip() or "unknown",
    }


# -- processes -----------------------------------------------------------------------------------------------


class Gate:
    """The lock that those who measure wait for; shut until they are ready."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "lock")

    @property
    def waiting(self) -> int:
        with contextlib.suppress(FileNotFoundError), open(self.path + ".waiting") as file:
            return len(file.readlines())
        return 0

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path + ".waiting")
        with open(self.path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class Measurement:
    """A process, mostly one that ends with a line of JSON: the benchmark's, or this script's."""

    def __init__(self, what: str, command: Sequence[str], **environ: str) -> None:
        self.what = what
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=self.out,
            stderr=self.err,
            env=os.environ | environ,
            cwd=ROOT,
            start_new_session=True,
        )

    def said(self, seconds: float) -> list[str]:
        """What it printed, once it has ended; it is made to."""
        try:
            self.process.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            self.stop()
        self.out.seek(0)
        return self.out.read().splitlines()

    def result(self, seconds: float) -> Found:
        """What it found, or {"failed": why}."""
        lines = self.said(seconds)
        with contextlib.suppress(IndexError, ValueError):
            found: Found = json.loads(lines[-1])
            return found
        self.err.seek(0)
        code = self.process.returncode
        why = self.err.read()[-800:] or f"exit status {code}"
        return {"failed": "no time was left" if code == -9 else why}

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


def bench(job: Any, **environ: str) -> Measurement:
    """A worker of dicp.bench."""
    s = job.setting
    what = f"{job.workload} {s.dtype} {s.phase}" + (f" x{s.batch}" if s.batch != 1 else "")
    return Measurement(what, ["-m", "dicp.bench", "--worker", job.text()], **environ)


def part_of(name: str, *arguments: str) -> Measurement:
    return Measurement(name, [__file__, "--part", name, *arguments])


# -- parts ---------------------------------------------------------------------------------------------------


def first_part(report: Report, gate: Gate, workers: int) -> None:
    """The suites beside what compiles for the benchmark of inference; then the measurements."""
    from dicp.bench import contestants
    from dicp.bench.run import Job
    from dicp.bench.workloads import Setting

    def job(kind: str, name: str, batch: int, names: Sequence[str] = contestants.ON_GPU) -> Measurement:
        setting = Setting("inference", "bf16", device="cuda", batch=batch)
        return bench(Job(kind, name, setting, tuple(names), lock=gate.path))

    with gate.shut(), tempfile.TemporaryDirectory() as folder:
        tests = start_tests()
        suite = start_conformance(Path(folder), workers)
        rows = [job("steady", name, BATCH["inference"]) for name in report.models]
        rows.append(job("steady", DECODING, 1, DECODERS))
        others = [part_of("kernels", "--lock", gate.path), job("overhead", report.models[0], 1)]
        wait_for(gate, [*rows, *others], report.left * 0.4)
        report.add("tests", tests_found(tests))
        suite.stop()
        report.add("conformance", conformance_found(Path(folder)))
    take(report, "models", rows)
    for name, other in zip(("kernels", "overhead"), others, strict=True):
        report.add(name, other.result(min(60, report.left)))


def second_part(report: Report, gate: Gate) -> None:
    """Training, and inference in float32."""
    from dicp.bench import contestants
    from dicp.bench.run import Job
    from dicp.bench.workloads import Setting

    settings = {
        Setting("training", "bf16", device="cuda", batch=BATCH["training"]): contestants.ON_GPU,
        Setting("inference", "fp32", device="cuda"): ("eager", "inductor", "dicp_cuda"),
    }
    with gate.shut():
        rows = [
            bench(Job("steady", name, setting, names, lock=gate.path))
            for setting, names in settings.items()
            for name in report.models
        ]
        wait_for(gate, rows, report.left * 0.6)
    take(report, "models", rows)


def wait_for(gate: Gate, rows: Sequence[Measurement], seconds: float, but: int = 0) -> None:
    """Until all but so many are ready to measure, or have ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended = sum(row.process.poll() is not None for row in rows)
        if gate.waiting + ended >= len(rows) - but:
            return
        time.sleep(0.2)


def take(report: Report, part: str, rows: Sequence[Measurement]) -> None:
    report.parts.setdefault(part, [])
    for row in rows:
        report.add(part, [{"what": row.what, **row.result(min(90, report.left))}])


def compile_times(report: Report) -> None:
    """Seconds of a cold compile: two models, each by Inductor and by dicp, at once, with a quarter of the
    processors each."""
    from dicp.bench.run import CACHES, Job
    from dicp.bench.workloads import Setting

    cpus = sorted(os.sched_getaffinity(0))
    share = max(1, len(cpus) // 4)
    found: Found = {}
    for names in (("bert", "resnet50"), ("gpt2", "vit")):
        if report.left < 60:
            break
        with tempfile.TemporaryDirectory() as folder:
            started = []
            for k, (name, contestant) in enumerate(itertools.product(names, ("inductor", "dicp_cuda"))):
                caches = {c: os.path.join(folder, str(k), c) for c in CACHES}
                setting = Setting("inference", "bf16", device="cuda")
                job = Job("compile", name, setting, (contestant,))
                os.sched_setaffinity(0, cpus[k * share % len(cpus) :][:share])
                started.append((name, contestant, bench(job, **caches)))
                os.sched_setaffinity(0, cpus)
            for name, contestant, one in started:
                result = one.result(min(90, report.left))
                found[f"{name} {contestant} s"] = result.get(contestant, result).get("s", str(result)[:300])
        report.add("compile", dict(found))


def tuned(report: Report, gate: Gate) -> None:
    """Inductor's max-autotune beside dicp's: three models tune at a time, those that take longest first;
    measured when all are ready."""
    from dicp.bench.run import Job
    from dicp.bench.workloads import Setting

    setting = Setting("inference", "bf16", device="cuda", batch=BATCH["inference"])
    end, rows = min(report.left * 0.4, 30.0 * len(report.models)), []
    with gate.shut():
        for name in reversed(report.models):
            wait_for(gate, rows, report.left - end, but=2)
            if report.left > end:
                rows.append(bench(Job("steady", name, setting, TUNED, lock=gate.path)))
        wait_for(gate, rows, report.left - end)
    take(report, "tuned", rows)


# -- the suites ----------------------------------------------------------------------------------------------


def start_tests() -> Measurement:
    where = "test/vendor/cuda/test_device.py"
    return Measurement("tests", ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", where])


def tests_found(tests: Measurement) -> Found:
    found: Found = {}
    for line in tests.said(60):
        kind, _, rest = line.partition(" ")
        if kind in ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL"):
            found.setdefault(kind, []).append(rest.partition("::")[2] or rest)
    return found


def start_conformance(folder: Path, workers: int) -> Measurement:
    command = ["-m", "dicp.conformance", "--vendor", "cuda_graph", "--grad", "--samples", "2"]
    command += ["--seconds", "500", "--dtypes", ",".join(DTYPES)]
    command += ["--workers", str(workers), "--resume", str(folder)]
    return Measurement("conformance", command)


def conformance_found(folder: Path) -> Found:
    """How many cases ended how, and what failed."""
    file = folder / "results.jsonl"
    results = [json.loads(line) for line in (file.read_text().splitlines() if file.exists() else ())]
    counts = Counter(case["status"] for r in results for case in r["cases"])
    failed = [
        f"{r['key']} {case['id']}: {case['message'][:200]}"
        for r in results
        for case in r["cases"]
        if case["status"] == "fail"
    ]
    failed += [f"{r['key']}: {r['error'][:200]}" for r in results if r.get("error")]
    operators = {r["key"].split("|")[0] for r in results}
    return {"units": len(results), "operators": len(operators), **counts, "failed": failed}


# -- kernels -------------------------------------------------------------------------------------------------


def kernel_cases() -> dict[str, tuple[Callable[[], Any], int]]:
    """Memory-bound calls, and the bytes that they have to move."""
    import torch
    import torch.nn.functional as F

    n = 8192
    x, y = torch.randn(2, n, n, device="cuda").bfloat16()
    w = torch.randn(n, device="cuda").bfloat16()
    rows, v = torch.randn(65536, 1024, device="cuda").bfloat16(), torch.randn(1024, device="cuda").bfloat16()
    wide = torch.randn(n, n, device="cuda")
    words = torch.randn(4096, 50257, device="cuda").bfloat16()
    size = x.nbytes
    return {
        "add": (lambda: x + y, 3 * size),
        "silu_mul": (lambda: F.silu(x) * y, 3 * size),
        "gelu": (lambda: F.gelu(x), 2 * size),
        "gelu fp32": (lambda: F.gelu(wide), 4 * size),
        "softmax": (lambda: torch.softmax(x, -1), 2 * size),
        "softmax 1024": (lambda: torch.softmax(rows, -1), 2 * size),
        "log_softmax 50257": (lambda: torch.log_softmax(words, -1), 2 * words.nbytes),
        "rms_norm": (lambda: F.rms_norm(x, (n,), w), 2 * size),
        "layer_norm": (lambda: F.layer_norm(x, (n,), w, w), 2 * size),
        "layer_norm 1024": (lambda: F.layer_norm(rows, (1024,), v, v), 2 * size),
        "sum of rows": (lambda: x.sum(-1), size),
        "sum of columns": (lambda: x.sum(0), size),
        "sum of 1024 columns": (lambda: rows.sum(0), size),
        "sum of all": (lambda: x.sum(), size),
        "var": (lambda: x.var(-1), size),
        "argmax": (lambda: x.argmax(-1), size),
        "transposed": (lambda: x.t().contiguous(), 2 * size),
        "transposed fp32": (lambda: wide.t().contiguous(), 4 * size),
        "plus transposed": (lambda: x + y.t(), 3 * size),
        "cat": (lambda: torch.cat([x, y], 1) * 2, 4 * size),
    }


def kernels(lock: str) -> Found:
    """% of the bandwidth of a copy."""
    import statistics

    import torch

    from dicp.bench.measure import alone
    from dicp.vendor.cuda_graph.clock import GpuClock

    clock = GpuClock()

    def rate(call: Callable[[], Any], nbytes: int) -> float:
        def some() -> None:
            for _ in range(8):
                call()

        return 8 * nbytes / statistics.median(clock(some) for _ in range(7)) / 1e9

    cases, calls = kernel_cases(), {}
    for name, (fn, _) in cases.items():
        calls[name] = {"eager": fn}
        for backend in ("inductor", "dicp_cuda"):
            calls[name][backend] = torch.compile(fn, backend=backend)
            calls[name][backend]()
    source, target = torch.empty(2, 1 << 28, dtype=torch.uint8, device="cuda")
    with alone(lock):
        copy = rate(lambda: target.copy_(source), 2 * source.nbytes)
        found: Found = {"copy GB/s": copy}
        for name, (_, nbytes) in cases.items():
            found[name] = {b: 100 * rate(call, nbytes) / copy for b, call in calls[name].items()}
    return found


# -- the page ------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    def text(v: Any) -> str:
        return f"{v:.3g}" if isinstance(v, float) else str(v).replace("\n", " ").replace("|", "/")

    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(text(v) for v in line) + " |" for line in lines] + [""]


def models_table(rows: Sequence[Found]) -> list[str]:
    names = list(dict.fromkeys(n for r in rows for n, f in r.items() if isinstance(f, dict) and "ms" in f))
    lines = []
    for r in rows:
        times = {n: r[n]["ms"] for n in names if "ms" in r.get(n, {})}
        mine = min((t for n, t in times.items() if n.startswith("dicp")), default=None)
        peers = min((t for n, t in times.items() if not n.startswith("dicp")), default=None)
        ratio = f"{peers / mine:.2f}" if mine and peers else str(r.get("failed", "-"))[:200]
        cells = [_time(r, n) for n in names]
        lines.append([r["what"], *cells, ratio])
    return table(["ms (of the GPU)", *names, "best peer / best dicp"], lines)


def _time(row: Found, name: str) -> str:
    found = row.get(name, {})
    if "ms" not in found:
        return str(found.get("failed", "-"))[:80]
    own = found.get("device_ms")
    return f"{found['ms']:.3g}" + (f" ({own:.3g})" if own else "")


def decoding_line(rows: Sequence[Found]) -> list[str]:
    for r in rows:
        if r["what"].startswith(DECODING) and "cost" in r and "ceilings" in r:
            rate, size = r["ceilings"]["read_gb_per_s"], r["cost"]["weight_bytes"]
            told = []
            for n, f in r.items():
                if isinstance(f, dict) and "ms" in f:
                    shares = {k: 100 * size / f[k] / 1e6 / rate for k in ("ms", "device_ms") if k in f}
                    own = f", {shares['device_ms']:.0f} of the GPU's time" if "device_ms" in shares else ""
                    told.append(f"{n} {shares['ms']:.0f} %{own} ({1e3 / f['ms']:.0f} tokens/s)")
            return [f"Decoding, of a copy's {rate:.0f} GB/s: {', '.join(told)}", ""]
    return []


def page(parts: Found) -> str:
    """The report as Markdown."""
    lines = ["# dicp_cuda on a GPU", "", ", ".join(f"{k} {v}" for k, v in parts["environment"].items()), ""]
    if "tests" in parts:
        lines += ["## Tests of the device", ""]
        lines += [f"* {kind}: {len(names)}" for kind, names in parts["tests"].items()]
        lines += [f"* failed: {n}" for n in parts["tests"].get("FAILED", [])] + [""]
    if "conformance" in parts:
        found = parts["conformance"]
        lines += ["## Conformance", "", ", ".join(f"{k} {v}" for k, v in found.items() if k != "failed"), ""]
        lines += [f"* {f}" for f in found["failed"]] + [""]
    if "models" in parts:
        lines += ["## Models", "", *models_table(parts["models"]), *decoding_line(parts["models"])]
    if "tuned" in parts:
        lines += ["## Inductor's max-autotune", "", *models_table(parts["tuned"])]
    if "kernels" in parts:
        rows = [[n, *f.values()] for n, f in parts["kernels"].items() if isinstance(f, dict)]
        copy = parts["kernels"].get("copy GB/s", parts["kernels"].get("failed"))
        lines += ["## Kernels, % of a copy", "", f"The copy: {copy} GB/s.", ""]
        lines += table(["kernel", "eager", "inductor", "dicp_cuda"], rows)
    lines += [f"* {problem}" for problem in parts.get("problems", [])]
    for part, what in (("overhead", "Three operations on 16 elements"), ("compile", "Cold compile")):
        if part in parts:
            lines += [f"## {what}", "", *table(["what", "figure"], [[k, v] for k, v in parts[part].items()])]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_check_results"))
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--models", default=",".join(MODELS), help="all by default; cold compiles: of four")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.part:
        print(json.dumps(kernels(args.lock)))
        return 0
    models = args.models.split(",")
    if unknown := set(models) - set(MODELS):
        parser.error(f"there is no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    report = Report(args.out, args.seconds, models)
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(folder)
        workers = max(1, len(os.sched_getaffinity(0)) // 3)
        parts: dict[str, Callable[[], None]] = {
            "inference": lambda: first_part(report, gate, workers),
            "tuned": lambda: tuned(report, gate),
            "compile": lambda: compile_times(report),
            "training": lambda: second_part(report, gate),
        }
        for name in args.parts or parts:
            if report.left > 45:
                try:
                    parts[name]()
                except Exception as e:  # whatever it is, the other parts run
                    traceback.print_exc()
                    report.add("problems", [f"{type(e).__name__}: {e}"])
                print(f"{list(report.parts)[-1]}: {report.left:.0f} s left", flush=True)
    print((args.out / "gpu_check.md").read_text())
    wrong = report.parts.get("conformance", {}).get("failed", []) + report.parts.get("problems", [])
    wrong += report.parts.get("tests", {}).get("FAILED", [])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
