"""The parent's side: worker processes that may crash or hang, each watched by a thread of this process."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from .unit import CaseResult, Unit, UnitResult, from_json
from .worker import LOST_DEVICE

START_SECONDS = 120.0
DEATHS_PER_UNIT = 3  # cases that may kill a worker before the rest of a unit is given up
HANGS_PER_UNIT = 1  # the same for cases that took the time limit, which may be minutes
LINES = 10  # of a dead process's log, in a report


@dataclass(frozen=True)
class Death:
    """How a worker ended: a `crash` (by a signal or an exit) or a `hang` (killed after the time limit)."""

    check: str
    message: str


def last_words(log: str) -> list[str]:
    """The lines of a dead process's log that tell where it died: the frames of the thread that did, the last
    call first, or else what it printed last."""
    lines = log.splitlines()
    at = next((k for k, line in enumerate(lines) if line.startswith("Current thread")), None)
    return [x for x in lines if x][-LINES:] if at is None else lines[at + 1 : at + 1 + LINES]


class WorkerDied(Exception):
    """The worker is gone."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.message)
        self.death = death


class Worker:
    """One child process and its pipes."""

    def __init__(self, backend: str, modules: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self._log = log.open("a+b")
        self._begun = self._log.tell()  # of the log, when the last message was sent
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dicp.conformance.worker", backend, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._buffer = b""
        self.receive(START_SECONDS)

    def send(self, message: dict[str, Any]) -> None:
        """Hand over one line."""
        self._begun = self._log.seek(0, os.SEEK_END)
        try:
            self._in.write(json.dumps(message).encode() + b"\n")
            self._in.flush()
        except BrokenPipeError:
            raise WorkerDied(self._obituary()) from None

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next line; raises WorkerDied where none comes in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(seconds):
                    self.kill()
                    raise WorkerDied(Death("hang", f"no answer within {seconds:.0f} s"))
                part = os.read(self._out.fileno(), 1 << 16)
                if not part:
                    raise WorkerDied(self._obituary())
                self._buffer += part
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def kill(self) -> None:
        """End the process and what it started (compilers among them)."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._log.close()

    def _obituary(self) -> Death:
        code = self._process.wait()
        self._log.seek(self._begun)
        words = last_words(self._log.read().decode(errors="replace"))
        self._log.close()
        if code == LOST_DEVICE:
            return Death("crash", "the device was lost: a kernel read or wrote where it must not")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return Death("crash", "\n  ".join([f"the process ended with {how}", *words]))

    @property
    def _in(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _out(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout


@dataclass(frozen=True)
class Pool:
    """Runs units over `workers` processes. log: a folder for what they print."""

    backend: str
    modules: tuple[str, ...]
    workers: int
    timeout: float
    log: Path

    def run(self, units: Iterable[Unit], report: Callable[[UnitResult], None]) -> None:
        """Run all units; `report` is called once for each as it ends, never by two threads at a time."""
        waiting = iter(units)
        lock = threading.Lock()
        stop = threading.Event()
        errors: list[BaseException] = []

        def serve(number: int) -> None:
            attendant = _Attendant(self, number)
            try:
                while not stop.is_set():
                    with lock:
                        unit = next(waiting, None)
                    if unit is None:
                        break
                    result = attendant.run(unit)
                    with lock:
                        report(result)
            except BaseException as e:  # handed to the main thread, which raises it
                errors.append(e)
                stop.set()
            finally:
                attendant.close()

        threads = [threading.Thread(target=serve, args=(n,), daemon=True) for n in range(self.workers)]
        for t in threads:
            t.start()
        try:
            for t in threads:
                while t.is_alive():
                    t.join(0.5)
        except KeyboardInterrupt:
            stop.set()
            raise
        if errors:
            raise errors[0]


class _Attendant:
    """One slot of the pool: its worker, replaced when it dies."""

    def __init__(self, pool: Pool, number: int) -> None:
        self._pool, self._number = pool, number
        self._worker: Worker | None = None

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _alive(self) -> Worker:
        if self._worker is None:
            environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONFAULTHANDLER": "1"}
            self._worker = Worker(
                self._pool.backend,
                self._pool.modules,
                self._pool.log / f"worker{self._number}.log",
                environment,
            )
        return self._worker

    def run(self, unit: Unit) -> UnitResult:
        """Run one unit; if that kills the worker, run its cases one by one to learn which did it."""
        try:
            return self._ask(unit)
        except WorkerDied:
            self._worker = None
        return self._isolated(unit)

    def _ask(self, unit: Unit) -> UnitResult:
        worker = self._alive()
        worker.send({"unit": asdict(unit), "isolate": False, "skip": []})
        return self._finish(worker.receive(self._pool.timeout))

    def _finish(self, answer: dict[str, Any]) -> UnitResult:
        if answer["retire"]:
            self.close()
        return from_json(answer["result"])

    def _isolated(self, unit: Unit) -> UnitResult:
        done: list[CaseResult] = []
        finished: list[str] = []
        eager, hangs = False, 0
        for _ in range(DEATHS_PER_UNIT):
            current, eager = None, False
            try:
                worker = self._alive()
                worker.send({"unit": asdict(unit), "isolate": True, "skip": finished})
                while "result" not in (answer := worker.receive(self._pool.timeout)):
                    if "done" not in answer:
                        eager = "eager" in answer
                        current = str(answer["eager" if eager else "starts"])
                    else:
                        done += [CaseResult(**c) for c in answer["done"]]
                        finished.append(str(current))
                        current = None
                result = self._finish(answer)
                known = {c.id for c in result.cases}
                result.cases += [c for c in done if c.id not in known]
                return result
            except WorkerDied as e:
                self._worker = None
                name = current if current is not None else "(before the first case)"
                status, whose = ("upstream", "eager: ") if eager else ("fail", "")
                done.append(CaseResult(name, status, e.death.check, whose + e.death.message, unit.key))
                finished.append(name)
                hangs += e.death.check == "hang"
                if current is None or hangs == HANGS_PER_UNIT:
                    break
        if eager:  # what eager cannot do is no case, nor may the others be
            return UnitResult(unit.key, done)
        return UnitResult(unit.key, done, error="given up: the worker died again and again")
