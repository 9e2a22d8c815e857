"""Generated C++ units to loaded code: one shared library per unit, built in parallel, kept in the cache.

One library per unit, not objects plus one link: linking one takes 0.01 s and loading it 0.1 ms, and each unit
is then cached, shared between graphs and evicted on its own.

The key of a unit knows the compiler by its identity (version and target). With everything cached no compiler
is run; where there is none, the identities found in the cache's own entries are tried.
"""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
import ctypes
import dataclasses
import errno
import functools
import importlib.machinery
import importlib.util
import logging
import os
import select
import shlex
import shutil
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from dicp.config import Config
from dicp.errors import BuildError, DicpError, NoCompileError
from dicp.runtime.cache import Store, open_store
from dicp.runtime.entry import Key, content_hash
from dicp.runtime.workers import worker_count
from dicp.vendor.cpu_graph import toolchain
from dicp.vendor.cpu_graph.toolchain import Flags, Toolchain

log = logging.getLogger("dicp.build")

SOURCE, LIBRARY = "unit.cpp", "unit.so"
_MESSAGE_LINES = 30
_ROOM = 1 << 20  # bytes a build needs at the least
_CRASHED = "internal compiler error"
_WITHOUT_SLP = "-fno-tree-slp-vectorize"
"""Without the pass that g++ 12 dies in for some strided loads with AVX-512; kernels are vectors already."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """One C++ translation unit; `user_lines` are the model's lines it came from, for errors. optimise:
    false for code without loops, which is built in a tenth of the time."""

    name: str
    source: str
    user_lines: tuple[str, ...] = ()
    optimise: bool = True


@dataclasses.dataclass(frozen=True)
class BuildStats:
    """What one build came to: distinct units found in the cache and compiled, and wall seconds."""

    hits: int = 0
    compiled: int = 0
    seconds: float = 0.0


@dataclasses.dataclass
class Library:
    """The loaded units; code stays loaded, and addresses valid, for the rest of the process."""

    units: tuple[tuple[Unit, ctypes.CDLL], ...]
    folders: tuple[Path, ...]  # cache entries, in the order of `units`; named after their keys
    stats: BuildStats

    @property
    def keys(self) -> tuple[str, ...]:
        """Cache digests, in the order of `units`."""
        return tuple(folder.name for folder in self.folders)

    def address(self, symbol: str) -> int:
        """Address of an exported function."""
        for unit, loaded in self.units:
            # the loader also looks through a library's dependencies: ask only where the name can be
            if symbol in unit.source and (found := _symbol(loaded, symbol)) is not None:
                return found
        raise BuildError(
            f"no unit exports {symbol!r}; units: {', '.join(u.name for u, _ in self.units)}",
            todo='declare it extern "C" __attribute__((visibility("default")))',
        )


def build(units: Sequence[Unit], config: Config) -> Library:
    """Compile what the cache lacks, in parallel, and load everything.

    Raises BuildError, ToolchainError (a compiler is needed and none is there), NoCompileError.
    """
    start = time.perf_counter()
    store = open_store(config)
    tools, reason = toolchain.find(config, store.folder())
    compilers = _compilers(tools, store)
    distinct = {unit.source: unit for unit in reversed(units)}
    distinct = dict(reversed(distinct.items()))
    variants = {
        optimise: [(identity, toolchain.flags(config, identity, optimise)) for identity in compilers]
        for optimise in (True, False)
    }
    plans = [_plan(unit, variants[unit.optimise]) for unit in distinct.values()]
    folders = {plan.unit.source: found for plan in plans if (found := _cached(plan, store)) is not None}
    hits = len(folders)
    todo = [plan for plan in plans if plan.unit.source not in folders]
    if todo:
        if config.no_compile:
            names = ", ".join(plan.unit.name for plan in todo)
            raise NoCompileError(
                f"{len(todo)} kernels are not in the cache and no_compile is set: {names}",
                where=todo[0].unit.user_lines,
                todo="warm the cache with the same sizes, options and versions, or unset no_compile",
            )
        if tools is None:
            raise toolchain.missing(reason)
        before = store.stats.builds
        folders |= _compile_all(todo, tools, config, store)
        log.debug("compiled %d units, %d by this process", len(todo), store.stats.builds - before)
    loaded = {
        plan.unit.source: _load(plan, folders[plan.unit.source], tools, config, store) for plan in plans
    }
    stats = BuildStats(hits, len(todo), time.perf_counter() - start)
    return Library(
        tuple((unit, loaded[unit.source]) for unit in units),
        tuple(folders[unit.source] for unit in units),
        stats,
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A unit with the keys it may be found under, and the flags of each (several only without a compiler)."""

    unit: Unit
    keys: tuple[Key, ...]
    flags: tuple[Flags, ...]


def _plan(unit: Unit, variants: Sequence[tuple[str, Flags]]) -> _Plan:
    source = content_hash(unit.source)
    keys = [
        Key.of(
            source=source,
            flags=" ".join(flags.code),
            isa=flags.isa,
            compiler=identity,
            **toolchain.environment_parts(),
        )
        for identity, flags in variants
    ]
    return _Plan(unit, tuple(keys), tuple(flags for _, flags in variants))


def _compilers(tools: Toolchain | None, store: Store) -> list[str]:
    """Identities to look under: the compiler's, or all that built what the cache holds."""
    return [tools.identity] if tools else store.part_values("compiler")


def compiler_identity(config: Config) -> str:
    """The compiler's identity; where there is none, that of the one whose results were used last, or "". """
    store = open_store(config)
    tools, _ = toolchain.find(config, store.folder())
    return next(iter(_compilers(tools, store)), "")


def _cached(plan: _Plan, store: Store) -> Path | None:
    return next((found for key in plan.keys if (found := store.get(key)) is not None), None)


# -- compiling


def _compile_all(todo: Sequence[_Plan], tools: Toolchain, config: Config, store: Store) -> dict[str, Path]:
    """Folders of the built units by source; the first failure stops the others."""
    jobs = _Jobs()
    workers = min(len(todo), worker_count(override=config.workers))
    # one worker takes a thread too: there no KeyboardInterrupt falls between starting a process and noting it
    pool = futures.ThreadPoolExecutor(workers, thread_name_prefix="dicp-build")
    try:
        with jobs.stopping():
            running = {pool.submit(_compile, plan, tools, config, store, jobs): plan for plan in todo}
            return {running[done].unit.source: done.result() for done in futures.as_completed(running)}
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _compile(plan: _Plan, tools: Toolchain, config: Config, store: Store, jobs: _Jobs) -> Path:
    unit = plan.unit

    def fill(folder: Path) -> None:
        (folder / SOURCE).write_text(unit.source)
        arguments = [
            *plan.flags[0].code,
            f"-I{toolchain.INCLUDE}",
            SOURCE,
            "-o",
            LIBRARY,
            *plan.flags[0].link,
        ]
        try:
            _run(tools, arguments, folder, config, store, jobs, unit)
        except BuildError as e:
            if _CRASHED not in e.message:
                raise
            log.warning("the compiler crashed on %s: trying again with %s", unit.name, _WITHOUT_SLP)
            _run(tools, [*arguments, _WITHOUT_SLP], folder, config, store, jobs, unit)

    return store.get_or_build(plan.keys[0], fill, label=unit.name)


def _run(
    tools: Toolchain,
    arguments: Sequence[str],
    folder: Path,
    config: Config,
    store: Store,
    jobs: _Jobs,
    unit: Unit,
) -> None:
    """Run the compiler in `folder`; BuildError with its message, the kept source and the user's lines."""
    command = [*tools.command, *arguments]
    try:
        status, output = jobs.run(command, folder, config.compile_timeout_s)
    except subprocess.TimeoutExpired:
        status, output = None, ""
    if status == 0 and (folder / LIBRARY).is_file():
        return
    # with no room left, ld dies of SIGBUS or says so, each in its own words
    if status is not None and (_says_full(output) or shutil.disk_usage(folder).free < _ROOM):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    if toolchain.lacks_openmp(output):
        raise toolchain.missing_openmp(tools.command[0])
    kept = store.keep_failed(f"{content_hash(unit.source)}{Path(SOURCE).suffix}", unit.source)
    if status is None:
        what = f"the compiler did not finish {unit.name} within {config.compile_timeout_s} s"
        todo = "raise compile_timeout_s, or try the command alone: "
    elif status < 0:
        what = f"the compiler was killed by signal {-status} while building {unit.name}"
        todo = "if memory is short, set workers=1; the command alone: "
    else:
        what = f"the compiler failed on {unit.name} (status {status})"
        todo = "this is a fault of dicp or of the compiler, not of the model; the command alone: "
    shown = [str(kept) if a == SOURCE else "/dev/null" if a == LIBRARY else a for a in command]
    lines = output.splitlines()
    head = lines[:_MESSAGE_LINES] + (
        [f"... {len(lines) - _MESSAGE_LINES} more lines"] if lines[_MESSAGE_LINES:] else []
    )
    raise BuildError(
        what, message="\n".join(head), source=str(kept), where=unit.user_lines, todo=todo + shlex.join(shown)
    )


def _says_full(output: str) -> bool:
    return "No space left on device" in output or "Disk quota exceeded" in output


class _Jobs:
    """The compiler processes of one build; all of them are killed when the build is left by an exception."""

    def __init__(self) -> None:
        self._live: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._mutex = threading.Lock()

    def run(self, command: Sequence[str], folder: Path, timeout: float) -> tuple[int, str]:
        """Exit status and output; subprocess.TimeoutExpired when the process had to be killed."""
        # files the compiler makes on the way go beside the result: one place to be full, one to clean up
        env = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
        with open(folder / "log", "w+b") as output:
            with self._mutex:
                if self._stopped:
                    raise futures.CancelledError
                process = _start(command, folder, env, output)
                self._live.add(process)
            try:
                status = _wait(process, timeout)
            finally:
                _kill(process)
                with self._mutex:
                    self._live.discard(process)
            output.seek(0)
            text = output.read(1 << 20).decode(errors="replace")
        os.unlink(folder / "log")
        return status, text

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Kill what still runs when the body is left by an exception."""
        try:
            yield
        except BaseException:
            with self._mutex:
                self._stopped = True
                for process in self._live:
                    _kill(process)
            raise


def _start(
    command: Sequence[str], folder: Path, env: dict[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that the compiler's own children can be killed with it
        )
    except OSError as e:
        if not folder.is_dir():  # somebody removed the cache under our feet: the store knows what to do
            raise
        if isinstance(e, FileNotFoundError):
            raise toolchain.missing(f"the C++ compiler {command[0]} has vanished") from e
        raise BuildError(
            f"cannot start the C++ compiler {command[0]}: {e}",
            todo="set workers=1, or free memory and processes",
        ) from e


def _wait(process: subprocess.Popen[bytes], timeout: float) -> int:
    """Its exit status, as soon as it ends: Popen.wait with a time limit only looks every 50 ms, of which a
    unit takes few. subprocess.TimeoutExpired where it does not end."""
    with contextlib.suppress(OSError):  # a kernel or a sandbox without pidfd
        descriptor = os.pidfd_open(process.pid)
        try:
            select.select([descriptor], [], [], timeout)
        finally:
            os.close(descriptor)
        timeout = 0.0
    return process.wait(timeout)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process's whole group, unless it has ended already."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- loading


def _load(plan: _Plan, folder: Path, tools: Toolchain | None, config: Config, store: Store) -> ctypes.CDLL:
    """Load a unit; once more from a fresh build when another process evicted it in between."""
    path = folder / LIBRARY
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as e:
        if path.exists() or tools is None or config.no_compile:
            raise BuildError(
                f"cannot load {plan.unit.name}: {e}", source=str(folder / SOURCE), where=plan.unit.user_lines
            ) from e
    folder = _compile_all([plan], tools, config, store)[plan.unit.source]
    return ctypes.CDLL(str(folder / LIBRARY), mode=os.RTLD_NOW | os.RTLD_LOCAL)


def _symbol(loaded: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
    except AttributeError:
        return None


# -- launching


def get_launcher(config: Config | None = None) -> Callable[..., int]:
    """`launch(fn_address, *ints) -> int`: calls `int64_t fn(const int64_t*)` with the GIL released.

    In C; where that cannot be built (no Python.h, no compiler) the same through ctypes.
    """
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
        for identity in _compilers(tools, store)
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
            _run(compiler, arguments, scratch, config, store, _Jobs(), Unit("launcher", source))

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
