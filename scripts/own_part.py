"""What dicp adds to a cold compile: its own seconds by phase, and the compilers' CPU seconds.

    python scripts/own_part.py --models resnet50,unet --phase training --repeat 3
    python scripts/own_part.py --layers 4,32      # LLaMA of the benchmark's widths, 128 tokens, by depth

Each figure is of a process of its own with empty caches, the cases in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from dicp.bench.models import CASES
from dicp.bench.workloads import WORKLOADS, Setting
from dicp.compiler import Compiled, observe


def _llama(layers: int) -> Callable[[], Any]:
    import torch

    case = CASES["llama"]
    like = case.build("full")
    like.config.num_hidden_layers = layers
    model, inputs = type(like)(like.config).eval(), case.inputs("full", 0, torch.float32)
    compiled = torch.no_grad()(torch.compile(model, backend="dicp_cpu"))
    return lambda: compiled(**inputs)


def measure(case: str, phase: str, dtype: str) -> dict[str, float]:
    """Of a first call in this process."""
    call = _llama(int(case)) if case.isdigit() else WORKLOADS[case].call("dicp_cpu", Setting(phase, dtype))
    seen: list[Compiled] = []
    with observe(seen.append):
        call()
    found: dict[str, float] = {}
    for name, seconds in (item for c in seen for item in c.seconds.items()):
        found[name] = found.get(name, 0.0) + seconds
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"own": sum(found.values()), **found, "compilers' CPU": spent.ru_utime + spent.ru_stime}


def _in_fresh_process(case: str, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "DICP_CACHE_DIR": f"{folder}/dicp", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch"}
        how = ["--one", case, "--phase", options.phase, "--dtype", options.dtype]
        command = [sys.executable, __file__, *how]
        output = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--models", default="resnet50,unet")
    parser.add_argument("--layers", help="LLaMA of so many layers each, in place of models")
    parser.add_argument("--phase", default="inference", choices=("inference", "training"))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.phase, options.dtype)))
        return
    cases = (options.layers or options.models).split(",")
    seen: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(options.repeat):
        for case in cases:
            seen[case].append(_in_fresh_process(case, options))
    for case, runs in seen.items():
        medians = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
        print(f"{case}: " + ", ".join(f"{name} {value:.2f} s" for name, value in medians.items()))


if __name__ == "__main__":
    main()
