"""Side by side: eager, Inductor (default mode) and dicp_cpu.

    python scripts/bench.py                      steady time: alternating rounds in one process, medians
    python scripts/bench.py --cold               compile time: a fresh process each, empty caches
    python scripts/bench.py --memory             peak memory of a call: a fresh process each
    python scripts/bench.py --overhead           microseconds per call of a graph of three ops on 16 elements
    python scripts/bench.py --all                all four
Options: --workloads llama-decode,resnet50  --dtype bf16  --rounds 7  --repeat 1  --json FILE  --markdown FILE
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from workloads import CONTESTANTS, DTYPES, ROOT, STANDARD, WORKLOADS, conditions

Row = dict[str, float | None]
Table = dict[str, Row]  # workload -> contestant -> figure

TITLES = {
    "steady": ("Time of a call, ms", "medians of alternating rounds in one process"),
    "cold": ("Cold compile, s", "first call less a steady one; fresh process, empty caches, after imports"),
    "memory": (
        "Peak memory, MB",
        "resident memory at its peak in a warm call over that before it, results included",
    ),
    "overhead": (
        "Per call, µs",
        "three ops on 16 elements; 'nothing' is a backend that returns the graph as it is",
    ),
}


def measure_steady(names: list[str], dtype: str, contestants: list[str], rounds: int) -> Table:
    """Milliseconds of a call, all contestants in this process, taking turns."""
    import torch
    from model import measure

    table: Table = {}
    for name in names:
        torch._dynamo.reset()
        calls = [WORKLOADS[name](c, DTYPES[dtype]) for c in contestants]
        for call in calls:
            call()
        table[name] = dict(zip(contestants, measure.alternating(calls, rounds)))
        print(
            f"  {name}: " + ", ".join(f"{c} {ms:.2f}" for c, ms in table[name].items()),
            file=sys.stderr,
            flush=True,
        )
        del calls, call
    return table


def in_fresh_process(kind: str, name: str, dtype: str, contestant: str, repeat: int) -> float | None:
    """Median over so many processes of what a worker of that kind prints; None where it failed."""
    found = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            caches = {
                variable: os.path.join(folder, variable)
                for variable in ("TORCHINDUCTOR_CACHE_DIR", "DICP_CACHE_DIR", "TRITON_CACHE_DIR")
            }
            command = [sys.executable, __file__, "--worker", kind, "--workloads", name]
            command += ["--dtype", dtype, "--contestants", contestant]
            done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            print(f"  {name} {contestant} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
            return None
        found.append(json.loads(done.stdout.splitlines()[-1]))
    figures = [f for f in found if f is not None]
    return statistics.median(figures) if figures else None


def measure_apart(kind: str, names: list[str], dtype: str, contestants: list[str], repeat: int) -> Table:
    """A figure from a process of its own for each workload and contestant."""
    table: Table = {}
    for name in names:
        row = {c: in_fresh_process(kind, name, dtype, c, repeat) for c in contestants}
        table[name] = row
        shown = ", ".join(f"{c} {'failed' if v is None else format(v, '.2f')}" for c, v in row.items())
        print(f"  {name}: {shown}", file=sys.stderr, flush=True)
    return table


def worker(kind: str, name: str, dtype: str, contestant: str) -> float | None:
    """In the fresh process: the figure for one workload and contestant."""
    import torch._dynamo
    from model import measure

    if contestant == "inductor":
        import torch._inductor.compile_fx  # noqa: F401  an import, not a compile
    elif contestant != "eager":
        torch._dynamo.backends.registry.lookup_backend(contestant)
    call = WORKLOADS[name](contestant, DTYPES[dtype])
    if kind == "cold":
        first = measure.seconds(call)
        return max(0.0, first - statistics.median(measure.seconds(call) for _ in range(3)))
    for _ in range(3):
        call()
    peaks = [measure.peak_growth(call) for _ in range(3)]
    known = [p for p in peaks if p is not None]
    return statistics.median(known) / 2**20 if known else None


def measure_overhead(contestants: list[str], rounds: int) -> Table:
    """Microseconds per call."""
    import torch
    from model import measure

    def three_ops(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + y) * y

    def nothing(gm: Any, example_inputs: Any) -> Any:
        return gm.forward

    x, y = torch.randn(16), torch.randn(16)
    functions = {c: three_ops if c == "eager" else torch.compile(three_ops, backend=c) for c in contestants}
    functions["nothing"] = torch.compile(three_ops, backend=nothing)
    calls = [lambda f=f: f(x, y) for f in functions.values()]
    with torch.no_grad():
        times = measure.alternating(calls, max(rounds, 9))
    return {"three ops": {name: ms * 1e3 for name, ms in zip(functions, times)}}


def render(kind: str, table: Table, markdown: bool) -> str:
    """One table; its last column compares dicp_cpu with the best of the others (of those that compile, where
    compiling or its overhead is what is measured)."""
    title, how = TITLES[kind]
    names = list(next(iter(table.values())))
    mine = "dicp_cpu" if "dicp_cpu" in names else None
    others = [
        n for n in names if n not in (mine, "nothing") and not (kind in ("cold", "overhead") and n == "eager")
    ]
    heads = ["", *names] + (["best other / dicp_cpu"] if mine and others else [])
    lines = []
    for workload, row in table.items():
        cells = [workload] + ["-" if row[n] is None else f"{row[n]:.2f}" for n in names]
        if mine and others:
            rivals = [row[n] for n in others if row[n] is not None]
            cells.append(f"{min(rivals) / row[mine]:.2f}x" if rivals and row[mine] else "-")
        lines.append(cells)
    if markdown:
        body = ["| " + " | ".join(r) + " |" for r in [heads, ["---", *["---:"] * (len(heads) - 1)], *lines]]
        return f"**{title}** ({how})\n\n" + "\n".join(body) + "\n"
    widths = [max(len(r[i]) for r in [heads, *lines]) for i in range(len(heads))]
    body = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths)))
            for r in [heads, *lines]]  # fmt: skip
    return f"{title} ({how})\n" + "\n".join(body) + "\n"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default=",".join(STANDARD), help=f"some of: {', '.join(WORKLOADS)}")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="eager, or names of backends")
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--repeat", type=int, default=1, help="processes for each cold or memory figure (median)"
    )
    for kind in ("cold", "memory", "overhead", "all"):
        parser.add_argument(f"--{kind}", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--worker", choices=["cold", "memory"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.workloads, args.contestants = args.workloads.split(","), args.contestants.split(",")
    unknown = [name for name in args.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"no workload {unknown[0]!r}; there are: {', '.join(WORKLOADS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.worker:
        print(json.dumps(worker(args.worker, args.workloads[0], args.dtype, args.contestants[0])))
        return 0
    wanted = [k for k in ("cold", "memory", "overhead") if args.all or getattr(args, k)]
    if args.all or not wanted:
        wanted.insert(0, "steady")
    about = conditions() | {"dtype": args.dtype, "rounds": args.rounds}
    heading = ", ".join(f"{k} {v}" for k, v in about.items())
    print(heading, flush=True)
    tables: dict[str, Table] = {}
    for kind in wanted:
        print(f"{TITLES[kind][0]} ...", file=sys.stderr, flush=True)
        if kind == "steady":
            tables[kind] = measure_steady(args.workloads, args.dtype, args.contestants, args.rounds)
        elif kind == "overhead":
            tables[kind] = measure_overhead(args.contestants, args.rounds)
        else:
            compilers = [c for c in args.contestants if c != "eager"] if kind == "cold" else args.contestants
            tables[kind] = measure_apart(kind, args.workloads, args.dtype, compilers, args.repeat)
        print("\n" + render(kind, tables[kind], markdown=False), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"conditions": about, "tables": tables}, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(heading + "\n\n" + "\n".join(render(k, t, True) for k, t in tables.items()))
    return 0 if all(v is not None for t in tables.values() for row in t.values() for v in row.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
