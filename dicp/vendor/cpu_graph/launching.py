"""The native launcher: calls a generated function from Python with the GIL released.

In C (launcher.c); where that cannot be built (no Python.h, no compiler) the same through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import logging
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dicp.config import Config
from dicp.errors import DicpError, NoCompileError
from dicp.runtime.cache import open_store
from dicp.runtime.entry import Key, content_hash
from dicp.vendor.cpu_graph import toolchain
from dicp.vendor.cpu_graph.build import LIBRARY, SOURCE, Jobs, Unit, compilers, run_compiler

log = logging.getLogger("dicp.build")


def get_launcher(config: Config | None = None) -> Callable[..., int]:
    """`launch(fn_address, *ints) -> int`: calls `int64_t fn(const int64_t*)` with the GIL released."""
    return _launching(config or Config.make())[0]


def bind(fn_address: int, n: int, config: Config | None = None) -> Callable[..., int]:
    """`bound(*ints) -> int` for one function of exactly n ints: `launch` with the address baked in."""
    return _launching(config or Config.make())[1](fn_address, n)


@functools.lru_cache(maxsize=8)
def _launching(config: Config) -> tuple[Callable[..., int], Callable[[int, int], Callable[..., int]]]:
    try:
        module = _launcher_module(config)
    except (DicpError, ImportError) as e:
        log.info("no native launcher, a call takes about 1 us more: %s", e)
        return _ctypes_launch, _ctypes_bind
    return module.launch, module.bind


def _launcher_module(config: Config) -> Any:
    folder = launcher_folder(config)
    loader = importlib.machinery.ExtensionFileLoader("dicp_launcher", str(folder / LIBRARY))
    spec = importlib.util.spec_from_loader("dicp_launcher", loader)
    if spec is None:
        raise ImportError("no import spec for the launcher")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def launcher_folder(config: Config) -> Path:
    """The launcher's cache entry, built where there is none. Raises DicpError, ImportError."""
    headers = Path(sysconfig.get_paths()["include"])
    source = (Path(__file__).parent / "launcher.c").read_text()
    store = open_store(config)
    tools, reason = toolchain.find(config, store.folder())
    code = ("-x", "c", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
    abi = str(sysconfig.get_config_var("SOABI"))
    keys = [
        Key.of(source=content_hash(source), flags=" ".join(code), python=abi, compiler=identity)
        for identity in compilers(tools, store)
    ]
    folder = next((found for key in keys if (found := store.get(key)) is not None), None)
    if folder is None:
        if config.no_compile:
            raise NoCompileError("the launcher is not in the cache and no_compile is set")
        if tools is None:
            raise toolchain.missing(reason)
        if not (headers / "Python.h").is_file():
            raise ImportError(f"no Python.h in {headers}")
        compiler = tools

        def fill(scratch: Path) -> None:
            (scratch / SOURCE).write_text(source)
            arguments = [*code, f"-I{headers}", SOURCE, "-o", LIBRARY]
            run_compiler(compiler, arguments, scratch, config, store, Jobs(), Unit("launcher", source))

        folder = store.get_or_build(keys[0], fill, label="launcher")
    return folder


_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))


def _ctypes_launch(fn_address: int, *ints: int) -> int:
    result: int = _PROTOTYPE(fn_address)((ctypes.c_int64 * len(ints))(*ints))
    return result


def _ctypes_bind(fn_address: int, n: int) -> Callable[..., int]:
    function, array = _PROTOTYPE(fn_address), ctypes.c_int64 * n

    def bound(*ints: int) -> int:
        if len(ints) != n:
            raise TypeError(f"expected {n} integers, got {len(ints)}")
        result: int = function(array(*ints))
        return result

    return bound
