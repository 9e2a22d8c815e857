"""`python -m dicp.conformance fuzz --seconds N --seed S`: random graphs, compiled against eager, mismatches
shrunk to scripts.

Program k of seed S is the same everywhere. Children do the work; one that crashes or hangs is replaced, and
the program it died of is a finding like any other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import vendors


def check(p: Any, backend: str) -> tuple[Any, bool] | None:
    """(finding, at the second sizes) of one program on a backend, None where all is well."""
    import torch

    from .fuzz_program import Finding, differs, function, inputs_of, run
    from .unit import first_line

    torch._dynamo.reset()
    compiled = torch.compile(function(p.source()), backend=backend, dynamic=p.dynamic)
    for second in (False, True) if p.dynamic else (False,):
        try:
            eager = run(function(p.source()), p, inputs_of(p, second))
        except Exception:  # the second sizes may mean nothing for a shrunk program
            return None
        try:
            actual = run(compiled, p, inputs_of(p, second))
        except Exception as e:  # whatever a compiler raises is the finding
            return Finding("error", first_line(e)), second
        found = differs(p, second, eager, actual)
        if found is not None:
            return found, second
    return None


def upstream(p: Any, backend: str, finding: Any, second: bool) -> bool:
    """Whether `aot_eager`, which is no compiler, goes wrong in the same way, and to the same results in all
    that is wrong; or raises, where torch traced tensors that lie otherwise than eager's; or does so as to the
    wrong result alone, and to all others."""
    return _upstream_whole(p, backend, finding, second) or _upstream_by_result(p, backend, finding)


def _upstream_by_result(p: Any, backend: str, finding: Any) -> bool:
    """`aot_eager` may get one result wrong and raise about another, or about a write to what that is a view
    of. So: what the wrong one is computed from, without writes; and the program without it."""
    from .fuzz_shrink import tidy

    writes = any(s.out is None for s in p.body)
    if finding.result is None or len(p.outputs) == 1 and not writes:
        return False
    wrong = p.outputs[finding.result]
    pure = tuple(s for s in p.body if s.out is not None)
    alone = tidy(dataclasses.replace(p, body=pure, outputs=(wrong,)))
    found = check(alone, backend)
    if found is None or not upstream(alone, backend, *found):
        return False
    others = tuple(o for o in p.outputs if o != wrong)
    rest = tidy(dataclasses.replace(p, outputs=others))
    found = check(rest, backend) if others else None
    return found is None or upstream(rest, backend, *found)


def _upstream_whole(p: Any, backend: str, finding: Any, second: bool) -> bool:
    import torch

    from .fuzz_program import differs, function, inputs_of, misled, run

    alone = check(p, "aot_eager") if backend != "aot_eager" else None
    if alone is not None and alone[0].kind == "error" and misled(p, second):
        return True
    if alone is None or signature(alone[0]) != signature(finding):
        return False
    if finding.kind == "error":
        return True
    if finding.kind == "metadata":
        return str(alone[0].message) == finding.message

    def outcome(name: str) -> Any:
        torch._dynamo.reset()
        compiled = torch.compile(function(p.source()), backend=name, dynamic=p.dynamic)
        results = [run(compiled, p, inputs_of(p, sizes)) for sizes in ((False, True) if second else (False,))]
        return results[-1]

    eager = run(function(p.source()), p, inputs_of(p, second))
    return differs(p, second, eager, outcome(backend), pardon=outcome("aot_eager")) is None


def forked(p: Any, backend: str, seconds: float) -> str:
    """How the program ends in a process of its own: ok | fails | crash | hang. For shrinking what kills
    processes.
    """
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            signal.alarm(0)
            code = 0 if check(p, backend) is None else 3
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "crash" if os.WIFSIGNALED(status) else "ok" if os.WEXITSTATUS(status) == 0 else "fails"
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hang"


def signature(finding: Any) -> str:
    """What makes two findings one: their kind and, for errors, the first words."""
    if finding.kind != "error":
        return str(finding.kind)
    words = finding.message.split("|")[0]
    return "error: " + "".join("#" if c.isdigit() else c for c in words)[:80]


def child(seed: int, first: int, step: int, backend: str, shrinking: bool) -> int:
    """Programs first, first + step, ... until killed; one JSON line before and after each."""
    from .worker import _private_stdout, quiet

    pipe = _private_stdout()
    quiet()
    from .fuzz_generate import generate
    from .fuzz_shrink import script, shrink

    def tell(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    k = first
    while True:
        p = generate(seed * 1_000_000 + k)
        tell({"starts": k, "script": script(p, backend, False, "as generated")})
        found = check(p, backend)
        if found is not None:
            finding, second = found
            tell({"shrinking": k, "kind": finding.kind, "message": finding.message})
            want = signature(finding)
            theirs = upstream(p, backend, finding, second)
            if shrinking and not theirs:

                def fails(q: Any, want: str = want) -> bool:
                    again = check(q, backend)
                    return again is not None and signature(again[0]) == want

                p = shrink(p, fails)
                finding, second = check(p, backend) or found
            tell(
                {
                    "found": k,
                    "kind": "upstream" if theirs else finding.kind,
                    "message": finding.message,
                    "signature": "upstream (aot_eager too)" if theirs else signature(finding),
                    "script": script(p, backend, second, finding.message),
                }
            )
        tell({"done": k})
        k += step


class _Alarm:
    """Kills a child that says nothing for too long."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.rang = process, False
        self.timer: threading.Timer | None = None

    def set(self, seconds: float) -> None:
        self.timer = threading.Timer(seconds, self._ring)
        self.timer.start()

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _ring(self) -> None:
        self.rang = True
        self.kill()


class _Watch:
    """One child at a time for one interleaved part of the programs."""

    def __init__(
        self, number: int, args: argparse.Namespace, backend: str, end: float, state: dict[str, Any]
    ) -> None:
        self.number, self.args, self.backend, self.end, self.state = number, args, backend, end, state

    def run(self) -> None:
        first = self.args.start + self.number
        while time.monotonic() < self.end:
            first = self._one_child(first) + self.args.workers

    def _one_child(self, first: int) -> int:
        """Run a child until the time is up or it dies. Returns the number of the program it was at."""
        process = self._start(first)
        alarm, done = _Alarm(process), False
        last: dict[str, Any] = {"starts": first, "script": ""}
        alarm.set(max(120, self.args.timeout))
        assert process.stdout is not None
        try:
            for line in process.stdout:
                alarm.stop()
                message = json.loads(line)
                done = "done" in message
                if "starts" in message:
                    last = message
                elif "found" in message:
                    self._keep(message)
                elif done:
                    self.state["programs"] += 1
                if time.monotonic() > self.end and done:
                    break
                alarm.set(900 if "shrinking" in message else self.args.timeout)
        finally:
            alarm.stop()
            alive = process.poll() is None
            alarm.kill()
            code = process.wait()
        if not done and (alarm.rang or not alive or code):
            self._died(last, "hang" if alarm.rang else "crash", code)
        return int(last["starts"])

    def _start(self, first: int) -> subprocess.Popen[bytes]:
        numbers = [str(n) for n in (self.args.seed, first, self.args.workers)]
        command = [sys.executable, "-m", "dicp.conformance.fuzz", "--child", *numbers, self.backend]
        command += ["0" if self.args.no_shrink else "1", *self.args.modules]
        with (self.args.output / f"child{self.number}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self._threads(), "PYTHONWARNINGS": "ignore"},
            )

    def _threads(self) -> dict[str, str]:
        """Two, where there are processors for them: what threads do to a program is a part of it."""
        count = min(2, len(os.sched_getaffinity(0)))
        return {"OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "passive"}

    def _died(self, last: dict[str, Any], kind: str, code: int) -> None:
        """The program that the child was at is a finding."""
        self._keep(
            {
                "found": last["starts"],
                "kind": kind,
                "signature": kind,
                "script": last["script"],
                "message": f"{kind} ({code})",
            }
        )

    def _keep(self, message: dict[str, Any]) -> None:
        path = self.args.output / f"{message['kind']}_{self.args.seed}_{message['found']}.py"
        path.write_text(
            f"# python -m dicp.conformance fuzz --seed {self.args.seed} "
            f"--start {message['found']} --workers 1\n{message['script']}"
        )
        self.state["found"].setdefault(message["signature"], []).append(
            (message["found"], message["message"], str(path))
        )
        print(f"[{message['found']}] {message['kind']}: {message['message'][:300]}\n    {path}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Exit status 0: nothing found; 1: findings, each a script in --output."""
    if argv and argv[0] == "--child":
        seed, first, step = map(int, argv[1:4])
        for name in argv[6:]:
            __import__(name)
        return child(seed, first, step, argv[4], argv[5] == "1")
    p = argparse.ArgumentParser(prog="python -m dicp.conformance fuzz", description=__doc__)
    p.add_argument("--vendor", default="cpu_graph")
    p.add_argument("--backend")
    p.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE")
    p.add_argument("--seconds", type=float, default=60)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--start", type=int, default=0, help="number of the first program")
    p.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--timeout", type=float, default=120, help="seconds for one program")
    p.add_argument("--no-shrink", action="store_true")
    p.add_argument("--output", type=Path, default=Path("fuzz_findings"), help="a folder for scripts and logs")
    args = p.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    backend = args.backend or vendors.backend_of(args.vendor)
    state: dict[str, Any] = {"programs": 0, "found": {}}
    end = time.monotonic() + args.seconds
    threads = [threading.Thread(target=_Watch(n, args, backend, end, state).run) for n in range(args.workers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    print(
        f"{state['programs']} programs, {sum(map(len, state['found'].values()))} findings "
        f"of {len(state['found'])} kinds"
    )
    for name, cases in sorted(state["found"].items(), key=lambda kv: -len(kv[1])):
        print(f"  {len(cases):4} {name}   e.g. {cases[0][2]}")
    return 1 if any(not name.startswith("upstream") for name in state["found"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
