"""Many threads, many calls, many processes, kills and damage: every result right, nothing built twice, memory flat.

Each test has a quick form and one of full length (`-m slow`).
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

GXX = shutil.which("g++") or ""
quick_and = lambda short, full: pytest.mark.parametrize(
    "many", [pytest.param(short, id="quick"), pytest.param(full, id="full", marks=pytest.mark.slow)]
)


# -- threads


def functions() -> list[tuple[Callable[..., Any], Callable[[random.Random], tuple[Any, ...]]]]:
    """(function, arguments of a random size); none is large."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape)

    w, b = rand(8, 6), rand(8)
    return [
        (lambda x: (x * 2).softmax(-1), lambda dice: (rand(dice.randint(2, 9), 5),)),
        (lambda x: F.gelu(F.linear(x, w, b)), lambda dice: (rand(dice.randint(2, 9), 6),)),
        (lambda x, y: (x + y).cumsum(0).sum(1), lambda dice: (rand(7, 3), rand(7, 3))),
        (lambda x: x[x > 0].exp().sum(), lambda dice: (rand(dice.randint(2, 40)),)),
        (lambda x: x.mul_(2).sum(0) + 1, lambda dice: (rand(4, dice.randint(2, 9)),)),
    ]


def same(actual: Any, expected: Any) -> bool:
    return bool(torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)) and actual.stride() == expected.stride()


def work(cases: list[Any], calls: int, seed: int, wrong: list[str], compiling: float) -> None:
    """Calls in one thread; now and then a function of its own is compiled, in this thread, while others call."""
    dice = random.Random(seed)
    try:
        for k in range(calls):
            fn, compiled, make = dice.choice(cases)
            if dice.random() < compiling:
                scale = dice.randint(2, 1000) + seed / 1000
                fn = lambda x, scale=scale: (x * scale).tanh().sum(-1)  # noqa: E731
                compiled, make = torch.compile(fn, backend="dicp_cpu"), lambda d: (torch.randn(3, d.randint(2, 5)),)
            args = make(dice)
            copies = [a.clone() for a in args]
            if not same(compiled(*args), fn(*copies)) or not all(map(torch.equal, args, copies)):
                wrong.append(f"seed {seed}, call {k}")
    except BaseException as e:  # a thread's exception would go unseen
        wrong.append(f"seed {seed}: {type(e).__name__}: {e}")
        raise


@quick_and((4, 20), (8, 2000))
def test_threads_call_while_others_compile(many: tuple[int, int]) -> None:
    count, calls = many
    torch.manual_seed(0)
    # torch 2.11 frees, with the first thread that traces, what tracing in others goes on to use
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    cases = [(fn, torch.compile(fn, backend="dicp_cpu"), make) for fn, make in functions()]
    wrong: list[str] = []
    settings = {"recompile_limit": 64, "capture_dynamic_output_shape_ops": True}
    # torch notes for the whole process that one thread traces, and refuses what another calls meanwhile
    settings["error_on_nested_fx_trace"] = False
    with torch._dynamo.config.patch(settings):
        threads = [
            threading.Thread(target=work, args=(cases, calls, seed, wrong, 4 / calls)) for seed in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


# -- calls


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmRSS")


@quick_and(400, 20_000)
def test_memory_is_flat(many: int) -> None:
    """Inference, training, sizes that come from data, views and externs, over and over."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256))
    step = torch.compile(model, backend="dicp_cpu", dynamic=True)
    chosen = torch.compile(lambda x: (x[x > 0] * 2, torch.linalg.svdvals(x), x.t()), backend="dicp_cpu")
    inputs = [torch.randn(n, 64) for n in (4, 9, 33)]
    square = torch.randn(16, 16)

    def calls(n: int) -> None:
        for k in range(n):
            step(inputs[k % 3]).sum().backward()
            with torch.no_grad():
                step(inputs[k % 3])
            if k % 4 == 0:
                chosen(square)
        gc.collect()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        calls(max(200, many // 20))
        before = resident()
        calls(many)
        grown = resident() - before
    assert grown < 4 << 20, f"{grown >> 10} KiB more after {many} rounds"


# -- processes

# Imports once, then forks, with one OpenMP thread: OpenMP's pool does not survive a fork.
FORKS = """
import json, os, random, signal, sys, time, torch, torch._dynamo
from torch import nn
import dicp.dynamo_bridge.aot
from dicp.config import Config
from dicp.runtime.cache import open_store
torch._dynamo.backends.registry.lookup_backend("dicp_cpu")

def compiles(seed):
    "Compile and check a small model with its backward; what it was must not depend on who was killed."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4 + seed % 3), nn.Softmax(-1))
    x = torch.randn(8, 16)
    want = model(x)
    want.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    got = torch.compile(model, backend="dicp_cpu")(x)
    got.square().sum().backward()
    torch.testing.assert_close(got, want)
    for p, g in zip(model.parameters(), gradients):
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-5)

def fork(run):
    child = os.fork()
    if child:
        return child
    try:
        run()
        os._exit(0)
    except BaseException as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        os._exit(1)

def race(count):
    start = time.monotonic() + 0.5
    def run():
        time.sleep(start - time.monotonic())
        compiles(0)
        line = json.dumps([time.monotonic() - start, open_store(Config.make()).stats.builds])
        os.write(1, line.encode() + b"\\n")  # at once: the others write to the same pipe
    children = [fork(run) for _ in range(count)]
    assert all(os.waitpid(c, 0)[1] == 0 for c in children)

def kill(times, longest):
    dice = random.Random(0)
    for k in range(times):
        child = fork(lambda: compiles(k))
        time.sleep(dice.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for k in range(3):
        assert os.waitpid(fork(lambda: compiles(k)), 0)[1] == 0

task, *numbers = sys.argv[1:]
{"race": race, "kill": kill}[task](*map(json.loads, numbers))
"""


def forks(folder: Path, *task: object, **env: str) -> list[Any]:
    script = folder / "forks.py"
    script.write_text(FORKS)
    caches = {"DICP_CACHE_DIR": str(folder / "dicp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}
    caches["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(script), *map(str, task)]
    done = subprocess.run(command, env=os.environ | caches | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not GXX, reason="needs g++")
@quick_and(3, 16)
def test_racing_processes_build_each_kernel_once(many: int, tmp_path: Path) -> None:
    """Run with -s to see wall seconds beside one process's; more processes than CPUs take their share longer,
    since each traces and lowers for itself."""
    log, cxx = tmp_path / "built", tmp_path / "g++"
    cxx.write_text(f'#!/bin/sh\n[ -f unit.cpp ] && md5sum < unit.cpp >> {log}\nexec {GXX} "$@"\n')
    cxx.chmod(0o755)
    (tmp_path / "one").mkdir()
    (alone, built), = forks(tmp_path / "one", "race", 1, DICP_CXX=str(cxx))
    assert built == len(set(log.read_text().splitlines())) >= 3
    log.unlink()
    found = forks(tmp_path, "race", many, DICP_CXX=str(cxx))
    lines = log.read_text().splitlines()
    assert len(found) == many
    assert len(lines) == len(set(lines)) == built == sum(n for _, n in found)
    wall = max(s for s, _ in found)
    # the same once more with every kernel built: what tracing and lowering take, which each process does for itself
    (again, rebuilt), = forks(tmp_path, "race", 1, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "other"))
    assert not rebuilt
    print(f"one process {alone:.2f} s, {again:.2f} without builds; {many} processes {wall:.2f} s")


@pytest.mark.skipif(not GXX, reason="needs g++")
@quick_and(2, 500)
def test_kills_leave_nothing_wrong(many: int, tmp_path: Path) -> None:
    forks(tmp_path, "kill", many, 2.5)


# -- damage


@pytest.mark.skipif(not GXX, reason="needs g++")
@quick_and(6, 2_000)
def test_damaged_entries_never_show(many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random damage to files of the build cache, to saved programs in torch's cache and to what leads there."""
    monkeypatch.setenv("DICP_CACHE_DIR", str(tmp_path / "dicp"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    dice = random.Random(0)
    fn, x = lambda x: x.softmax(-1) * 2 + 1, torch.randn(5, 7)  # noqa: E731
    want = fn(x)

    def run() -> None:
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(fn, backend="dicp_cpu")(x), want)

    run()
    for _ in range(many):
        kept = [tmp_path / "torch" / "aotautograd", tmp_path / "torch" / "dicp", *tmp_path.rglob("entries")]
        files = sorted(p for folder in kept for p in folder.rglob("*") if p.is_file())
        path = dice.choice(files)
        damage(path, dice)
        if "entries" in path.parts:  # else nobody would look at the build cache
            shutil.rmtree(tmp_path / "torch" / "aotautograd", ignore_errors=True)
        run()


def damage(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start, end = 0, len(data)
    if "aotautograd" in path.parts:  # what torch itself stores around our program has no checksum
        start = max(0, bytes(data).find(b"_unpickled")) + 100
        end = max(start + 1, bytes(data).find(b"runtime_metadata"))
    how = dice.randrange(4) if start < min(end, len(data)) else 2  # what is damaged already may be short
    if how == 0:
        data[dice.randrange(start, min(end, len(data)))] ^= 1 << dice.randrange(8)
    elif how == 1:
        del data[dice.randrange(len(data)) :]
    elif how == 2:
        data = bytearray()
    else:
        at = dice.randrange(start, min(end, len(data)))
        data[at : min(at + 64, end)] = dice.randbytes(min(at + 64, end) - at)
    path.unlink()  # a new file: the old one may be mapped, as code, into this process
    path.write_bytes(bytes(data))
