"""The native launcher: a kernel whose grid does not vary is launched without Python in it (launcher.c). Where
that cannot be built (no Python.h, no compiler) a launch takes some 3 us more.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("dicp")


@functools.cache
def _module() -> Any:
    from triton.runtime.build import compile_module_from_src

    source = (Path(__file__).parent / "launcher.c").read_text()
    try:
        return compile_module_from_src(source, "dicp_cuda_launcher")
    except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as e:
        log.info("no native launcher, a launch takes about 3 us more: %s", e)
        return None


def native(
    launch_address: int, slow: Callable[..., None], pointers: int, arguments: int, programs: int
) -> Any:
    """kernel(device, stream, how, *arguments) for a grid of so many programs, of which the first arguments
    are addresses; `slow` is called in its place for variants that it was not told by `note`, and where a
    launch fails. None where it cannot be had."""
    module = _module()
    return None if module is None else module.kernel(launch_address, slow, pointers, arguments, programs)


def prepare() -> None:
    """Build the launcher, unless Triton's cache has it."""
    _module()


__all__ = ["native", "prepare"]
