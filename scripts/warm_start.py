"""Warm starts of LLaMA (4 layers): seconds of the first call in a process that has done its imports.

    python scripts/warm_start.py [--workload llama|resnet50] [--repeat 5] [--folder DIR] [--json FILE]

  caches      a second process with the caches of a first one: Dynamo traces, nothing is compiled
  precompile  likewise under torch._dynamo.config.caching_precompile: Dynamo is skipped too
  saved       torch.compile(...).aot_compile(...) in a first process, loaded from its file (caches empty)
The backends `eager` (Dynamo alone) and `aot_eager` are what a start costs that neither compiles nor loads.
--folder: caches filled there by an earlier run are used, and stay.
dicp's processes see no compiler (PATH is empty); Inductor's do. `torch.compile` or the load counts
as part of the first call; `steady` is a later call.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODES = ("caches", "precompile", "saved")
CONTESTANTS = ("inductor", "dicp_cpu", "eager", "aot_eager")


def worker(mode: str, contestant: str, workload: str, folder: str, fill: bool) -> dict[str, Any]:
    """In a fresh process: the first call, which fills the caches or finds them filled."""
    import torch
    import torch._dynamo.aot_compile
    from serving import Scores

    from dicp.bench.models import CASES

    if contestant == "inductor":
        import torch._inductor.compile_fx
    else:
        torch._dynamo.backends.registry.lookup_backend(contestant)
        if contestant == "dicp_cpu":
            import dicp.dynamo_bridge.aot  # noqa: F401  an import, not a compile
    torch._dynamo.config.caching_precompile = mode == "precompile"
    inputs = CASES[workload].inputs("full", 0, torch.float32)
    name = "input_ids" if "input_ids" in inputs else next(iter(inputs))
    model = Scores(CASES[workload].build("full"), name)
    x, file = inputs[name], Path(folder) / "function"
    with torch.no_grad():
        start = time.perf_counter()
        if mode != "saved":
            call = torch.compile(model, backend=contestant)
        elif fill:
            # guards on modules cannot be written to a file
            options = {"guard_filter_fn": torch.compiler.keep_portable_guards_unsafe}
            compiled = torch.compile(model.forward, backend=contestant, fullgraph=True, options=options)
            function = compiled.aot_compile(((x,), {}))
            function.save_compiled_function(str(file))
            return {}
        else:
            with open(file, "rb") as data:
                function = torch.compiler.load_compiled_function(data)
            call = lambda x: function(model, x)  # noqa: E731
        result = call(x)
        first = time.perf_counter() - start
        torch.testing.assert_close(result, model(x), rtol=1e-3, atol=1e-3)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            call(x)
            seconds.append(time.perf_counter() - start)
    if fill:
        torch.compiler.save_cache_artifacts()
    counters = torch._dynamo.utils.counters["dicp"]
    return {
        "first": first,
        "steady": statistics.median(seconds),
        "compiled": counters["graphs"],
        "loaded": counters["graphs_loaded"],
    }


def process(mode: str, contestant: str, workload: str, folder: str, fill: bool) -> dict[str, Any]:
    """Run a worker with the caches in the folder."""
    caches = {v: os.path.join(folder, v) for v in ("TORCHINDUCTOR_CACHE_DIR", "DICP_CACHE_DIR")}
    env = os.environ | caches
    if contestant == "dicp_cpu" and not fill:
        env |= {"PATH": os.path.join(folder, "nothing")}
        env.pop("CXX", None)
        if mode == "saved":
            for cache in caches.values():
                shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, __file__, "--worker", mode, contestant, workload, folder, str(int(fill))]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{mode} {contestant} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", default="llama", choices=("llama", "resnet50"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--folder")
    parser.add_argument("--json")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        *given, fill = args.worker
        print(json.dumps(worker(*given, fill=fill == "1")))
        return
    table: dict[str, dict[str, Any]] = {}
    modes = args.modes.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        root = args.folder or temporary
        arms = [(m, c) for m in modes for c in CONTESTANTS if m == "caches" or c == "dicp_cpu"]
        folders = {arm: os.path.join(root, "-".join(arm)) for arm in arms}
        for arm, folder in folders.items():
            if os.path.exists(folder):
                continue
            os.makedirs(folder)
            process(*arm, args.workload, folder, fill=True)
        runs: dict[Any, list[Any]] = {arm: [] for arm in arms}
        for _ in range(args.repeat):
            for arm, folder in folders.items():
                runs[arm].append(process(*arm, args.workload, folder, fill=False))
        for arm, found in runs.items():
            row = {k: statistics.median(f[k] for f in found) for k in found[0]}
            table[" ".join(arm)] = row
            print(
                f"{' '.join(arm):<24} first call {row['first']:.3f} s, steady {row['steady']:.3f} s, "
                f"{row['compiled']:.0f} graphs compiled, {row['loaded']:.0f} loaded"
            )
    if args.json:
        Path(args.json).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
