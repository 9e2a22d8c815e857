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
import logging
import os
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from dicp.config import Config
from dicp.errors import BuildError, DicpError, NoCompileError
from dicp.runtime.cache import Reservation, Store, open_store
from dicp.runtime.entry import Key, content_hash
from dicp.runtime.program import BuildStats
from dicp.runtime.workers import worker_count
from dicp.vendor.cpu_graph import toolchain
from dicp.vendor.cpu_graph.toolchain import EFFORTS, Effort, Flags, Toolchain

log = logging.getLogger("dicp.build")

SOURCE, LIBRARY = "unit.cpp", "unit.so"
LOG, DONE = "log", "done"  # in a folder while its unit is compiled
_MESSAGE_LINES = 30
_ROOM = 1 << 20  # bytes a build needs at the least
_CRASHED = "internal compiler error"
_WITHOUT_SLP = "-fno-tree-slp-vectorize"
"""Without the pass that g++ 12 dies in for some strided loads with AVX-512; kernels are vectors already."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """One C++ translation unit; `user_lines` are the model's lines it came from, for errors. A source has one
    effort wherever it is built."""

    name: str
    source: str
    user_lines: tuple[str, ...] = ()
    effort: Effort = "full"


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
    with Build(config) as running:
        return running.finish(units)


class Build:
    """A build that may begin with some of its units. What still runs when it is left is killed."""

    def __init__(self, config: Config) -> None:
        self.config, self.store = config, open_store(config)
        self.tools, self.reason = toolchain.find(config, self.store.folder())
        identities = compilers(self.tools, self.store)
        self.variants = {
            effort: [(identity, toolchain.flags(config, identity, effort)) for identity in identities]
            for effort in EFFORTS
        }
        self.workers = worker_count(override=config.workers)
        # one worker takes a thread too: there no KeyboardInterrupt falls between starting a process and
        # noting it
        self.pool = futures.ThreadPoolExecutor(self.workers, thread_name_prefix="dicp-build")
        self.jobs = Jobs()
        self.plans: dict[str, _Plan] = {}  # by source, as the next
        self.found: dict[str, Path] = {}
        self.taken: set[str] = set()  # sources that a queue or a future is about
        self.begun: list[_Queue] = []  # and not collected yet
        self.queues: list[_Queue] = []  # all of them
        self.running: list[futures.Future[dict[str, Path]]] = []

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *exception: object) -> None:
        self.jobs.stop()
        self.pool.shutdown(wait=True, cancel_futures=True)
        for queue in self.queues:
            queue.release()

    def begin(self, units: Sequence[Unit]) -> None:
        """Start compiling those that the cache lacks, in this order, for a caller with other work at hand:
        compilers follow one another without this process, whose threads would get the interpreter every 5 ms
        and need it some 50 times between two. What goes wrong, `finish` does again, and says."""
        tools = self.tools
        if tools is None:
            return
        tried = [(plan, self.store.reserve(plan.keys[0])) for plan in self._lacking(units)]
        reserved = [(plan, entry) for plan, entry in tried if entry is not None]
        if not reserved:
            return
        queue = _Queue(reserved, min(self.workers, len(reserved)))
        self.queues.append(queue)
        self.begun.append(queue)
        self.taken.update(plan.unit.source for plan, _ in reserved)
        self.pool.submit(queue.start, tools, self.jobs).result()

    def submit(self, units: Sequence[Unit]) -> None:
        """Compile those that the cache lacks, in this order, after what has begun."""
        for queue in self.begun:
            for shell in range(queue.shells):  # each takes a worker's place
                self.running.append(self.pool.submit(self._collect, queue, shell))
        self.begun = []
        for plan in self._lacking(units):
            self.taken.add(plan.unit.source)
            self.running.append(self.pool.submit(self._compile, plan))

    def finish(self, units: Sequence[Unit]) -> Library:
        """Compile the rest and load these units; the first failure stops the others. Raises as `build`."""
        start = time.perf_counter()
        self.submit(units)
        missing = [self.plans[u.source] for u in units if u.source not in {*self.found, *self.taken}]
        if missing:
            self._refuse(missing)
        folders = dict(self.found)
        for done in futures.as_completed(self.running):
            folders |= done.result()
        failed = [self.plans[u.source] for u in units if u.source not in folders]
        for done in futures.as_completed([self.pool.submit(self._compile, plan) for plan in failed]):
            folders |= done.result()
        loaded = {u.source: self._load(self.plans[u.source], folders[u.source]) for u in units}
        compiled = len(loaded.keys() - self.found.keys())
        log.debug("compiled %d units", compiled)
        stats = BuildStats(len(loaded) - compiled, compiled, time.perf_counter() - start)
        return Library(
            tuple((unit, loaded[unit.source]) for unit in units),
            tuple(folders[unit.source] for unit in units),
            stats,
        )

    def _lacking(self, units: Sequence[Unit]) -> list[_Plan]:
        """Of the distinct units that are neither found nor taken; none where nothing may be compiled."""
        for unit in units:
            if unit.source not in self.plans:
                plan = self.plans[unit.source] = _plan(unit, self.variants[unit.effort])
                if (found := _cached(plan, self.store)) is not None:
                    self.found[unit.source] = found
        if self.tools is None or self.config.no_compile:
            return []
        sources = dict.fromkeys(unit.source for unit in units)
        return [self.plans[x] for x in sources if x not in self.found and x not in self.taken]

    def _compile(self, plan: _Plan) -> dict[str, Path]:
        assert self.tools is not None
        return {plan.unit.source: _compile(plan, self.tools, self.config, self.store, self.jobs)}

    def _collect(self, queue: _Queue, shell: int) -> dict[str, Path]:
        """When the last shell of a queue has ended, enter in the cache what they made."""
        queue.wait(shell, self.config.compile_timeout_s, self.jobs)
        return queue.leave()

    def _refuse(self, missing: Sequence[_Plan]) -> None:
        if self.config.no_compile:
            names = ", ".join(plan.unit.name for plan in missing)
            raise NoCompileError(
                f"{len(missing)} kernels are not in the cache and no_compile is set: {names}",
                where=missing[0].unit.user_lines,
                todo="warm the cache with the same sizes, options and versions, or unset no_compile",
            )
        raise toolchain.missing(self.reason)

    def _load(self, plan: _Plan, folder: Path) -> ctypes.CDLL:
        """Load a unit; once more from a fresh build when another process evicted it in between."""
        path = folder / LIBRARY
        try:
            return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as e:
            if path.exists() or self.tools is None or self.config.no_compile:
                raise BuildError(
                    f"cannot load {plan.unit.name}: {e}",
                    source=str(folder / SOURCE),
                    where=plan.unit.user_lines,
                ) from e
        folder = self.pool.submit(self._compile, plan).result()[plan.unit.source]
        return ctypes.CDLL(str(folder / LIBRARY), mode=os.RTLD_NOW | os.RTLD_LOCAL)


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


def compilers(tools: Toolchain | None, store: Store) -> list[str]:
    """Identities to look under: the compiler's, or all that built what the cache holds."""
    return [tools.identity] if tools else store.part_values("compiler")


def compiler_identity(config: Config) -> str:
    """The compiler's identity; where there is none, that of the one whose results were used last, or "". """
    store = open_store(config)
    tools, _ = toolchain.find(config, store.folder())
    return next(iter(compilers(tools, store)), "")


def _cached(plan: _Plan, store: Store) -> Path | None:
    return next((found for key in plan.keys if (found := store.get(key)) is not None), None)


# -- compiling


def _arguments(plan: _Plan) -> list[str]:
    """Of the compiler, in the unit's folder."""
    flags = plan.flags[0]
    return [*flags.code, f"-I{toolchain.INCLUDE}", SOURCE, "-o", LIBRARY, *flags.link]


class _Queue:
    """Units that shells compile one after another, each in its reserved folder: whoever makes a unit's log
    compiles it."""

    def __init__(self, entries: Sequence[tuple[_Plan, Reservation]], shells: int) -> None:
        self.entries, self.shells = entries, shells
        self.processes: list[subprocess.Popen[bytes]] = []
        self._running = shells
        self._mutex = threading.Lock()

    def start(self, tools: Toolchain, jobs: Jobs) -> None:
        lines = ["set -C"]  # to an existing file is then not written
        with contextlib.suppress(OSError, DicpError):
            for plan, entry in self.entries:
                (entry.folder / SOURCE).write_text(plan.unit.source)
                compiling = shlex.join([*tools.command, *_arguments(plan)])
                place = shlex.quote(str(entry.folder))
                lines += [
                    f"cd {place} && (: >{LOG}) 2>/dev/null &&",
                    f"  TMPDIR={place} {compiling} >>{LOG} 2>&1 && : >{DONE}",
                ]
            with open(os.devnull, "wb") as nowhere:
                for _ in range(self.shells):
                    command = ["/bin/sh", "-c", "\n".join(lines)]
                    self.processes.append(jobs.start(command, self.entries[0][1].folder, nowhere))

    def wait(self, shell: int, timeout: float, jobs: Jobs) -> None:
        """For each unit so many seconds; what takes longer is killed."""
        if shell < len(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                jobs.wait(self.processes[shell], timeout * len(self.entries))

    def leave(self) -> dict[str, Path]:
        """One shell less. After the last, whom a log tells nothing any more: the cache's entries by source;
        others may build what was not made."""
        with self._mutex:
            self._running -= 1
            if self._running > 0:
                return {}
        try:
            tried = {plan.unit.source: _published(plan, entry) for plan, entry in self.entries}
            return {source: folder for source, folder in tried.items() if folder is not None}
        finally:
            self.release()

    def release(self) -> None:
        for _, entry in self.entries:
            entry.release()


def _published(plan: _Plan, entry: Reservation) -> Path | None:
    """The cache's entry of a unit that a queue compiled; None where it did not or there is no room."""
    try:
        (entry.folder / LIBRARY).stat()
        (entry.folder / DONE).unlink()
        (entry.folder / LOG).unlink()
        return entry.publish(plan.unit.name)
    except OSError:
        return None


def _compile(plan: _Plan, tools: Toolchain, config: Config, store: Store, jobs: Jobs) -> Path:
    unit = plan.unit

    def fill(folder: Path) -> None:
        (folder / SOURCE).write_text(unit.source)
        arguments = _arguments(plan)
        try:
            run_compiler(tools, arguments, folder, config, store, jobs, unit)
        except BuildError as e:
            if _CRASHED not in e.message:
                raise
            log.warning("the compiler crashed on %s: trying again with %s", unit.name, _WITHOUT_SLP)
            run_compiler(tools, [*arguments, _WITHOUT_SLP], folder, config, store, jobs, unit)

    return store.get_or_build(plan.keys[0], fill, label=unit.name)


def run_compiler(
    tools: Toolchain,
    arguments: Sequence[str],
    folder: Path,
    config: Config,
    store: Store,
    jobs: Jobs,
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
        todo = "this is a bug in dicp or in the compiler, not in the model; the command alone: "
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


class Jobs:
    """The compiler processes of one build; all of them are killed when the build is left by an exception."""

    def __init__(self) -> None:
        self._live: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._mutex = threading.Lock()

    def run(self, command: Sequence[str], folder: Path, timeout: float) -> tuple[int, str]:
        """Exit status and output; subprocess.TimeoutExpired when the process had to be killed."""
        with open(folder / LOG, "w+b") as output:
            status = self.wait(self.start(command, folder, output), timeout)
            output.seek(0)
            text = output.read(1 << 20).decode(errors="replace")
        os.unlink(folder / LOG)
        return status, text

    def start(self, command: Sequence[str], folder: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """A process in a folder. Raises CancelledError when stopped, OSError, ToolchainError, BuildError."""
        # files the compiler makes on the way go beside the result: one place to be full, one to clean up
        env = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
        with self._mutex:
            if self._stopped:
                raise futures.CancelledError
            process = _start(command, folder, env, output)
            self._live.add(process)
        return process

    def wait(self, process: subprocess.Popen[bytes], timeout: float) -> int:
        """Exit status; subprocess.TimeoutExpired when the process had to be killed."""
        try:
            return _wait(process, timeout)
        finally:
            _kill(process)
            with self._mutex:
                self._live.discard(process)

    def stop(self) -> None:
        """Kill what still runs, and start nothing more."""
        with self._mutex:
            self._stopped = True
            for process in self._live:
                _kill(process)


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


def _symbol(loaded: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
    except AttributeError:
        return None
