"""Page faults per call, and the peak of resident memory, in the steady state: after calls that touched what
there is to touch, with nothing given back in between as `dicp.bench` does before it measures a peak.

    python scripts/resident.py --models llama,mobilenet_v2 --contestants eager,inductor,dicp_cpu
    DICP_KEEP_RESULTS=0 python scripts/resident.py --models llama --contestants dicp_cpu  # without the pool

Each line is of a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from dicp.bench import contestants, measure
from dicp.bench.workloads import WORKLOADS, Setting

FIRST = 6  # calls that compile, and after which allocators have found their sizes


def faults() -> int:
    """Pages of this process that the system had to find memory for, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def steady(model: str, contestant: str, setting: Setting, calls: int) -> str:
    """Page faults of each call, the median of their times, and the peak of them all."""
    contestants.get(contestant).load()
    call = WORKLOADS[model].call(contestant, setting)
    for _ in range(FIRST):
        call()
    Path("/proc/self/clear_refs").write_text("5")  # the peak (VmHWM) begins anew
    seen, times = [], []
    for _ in range(calls):
        before = faults()
        times.append(measure.seconds(call))
        seen.append(faults() - before)
    peak = measure.status("VmHWM") / 1e6
    return (
        f"{model:14}{contestant:12}{peak:8.0f} MB{statistics.median(times) * 1e3:9.1f} ms"
        f"{statistics.median(seen):9.0f} faults ({min(seen)} to {max(seen)})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama,mixtral,mobilenet_v2,convnext,resnet50")
    parser.add_argument("--contestants", default="eager,inductor,dicp_cpu")
    parser.add_argument("--phase", default="training", choices=("inference", "training"))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "CONTESTANT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(steady(*options.one, Setting(options.phase, options.dtype), options.calls))
        return
    how = ["--phase", options.phase, "--dtype", options.dtype, "--calls", str(options.calls)]
    for model in options.models.split(","):
        for contestant in options.contestants.split(","):
            subprocess.run([sys.executable, __file__, "--one", model, contestant, *how], check=True)


if __name__ == "__main__":
    main()
