"""A worker process: units in as JSON lines on stdin, results out as JSON lines, all else to a log.

python -m dicp.conformance.worker BACKEND [MODULE ...]

The modules are imported first: they may register backends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import traceback
import warnings
from typing import IO, Any

MEMORY_LIMIT = 6 << 30  # bytes of resident memory after which a worker asks to be replaced
LOST_DEVICE = 86  # exit status


def _private_stdout() -> IO[str]:
    """The pipe to the parent; stdout itself becomes stderr, so that no print can break the protocol."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return pipe


def quiet() -> None:
    """One thread, no warnings, and no cached compilations: a cache hit would hide what this run should
    see.
    """
    import torch
    import torch._functorch.config

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._functorch.config.enable_autograd_cache = False
    torch._C._set_warnAlways(False)


def main(argv: list[str]) -> int:
    """Serve until stdin closes."""
    pipe = _private_stdout()
    backend, modules = argv[0], argv[1:]
    for name in modules:
        importlib.import_module(name)
    quiet()
    from . import opdb, unit
    from .unit import Unit, UnitResult, first_line, run_unit

    def tell(message: dict[str, Any]) -> None:
        """Unless the device is lost: then the worker ends, and the parent learns in another whose doing it
        was."""
        if unit.device_lost(device):
            os._exit(LOST_DEVICE)
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    device = "cpu"

    opdb.operators()
    gc.collect()
    gc.freeze()  # the database stays: collections need not walk through it
    tell({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        given = Unit(**job["unit"])
        device = given.device
        try:
            result = run_unit(given, backend, tell if job["isolate"] else None, job["isolate"], job["skip"])
        except Exception as e:  # a unit that cannot even be set up is reported, too
            traceback.print_exc()
            result = UnitResult(given.key, error=first_line(e))
        gc.collect()
        tell({"result": result.to_json(), "retire": _resident() > MEMORY_LIMIT})
    return 0


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
