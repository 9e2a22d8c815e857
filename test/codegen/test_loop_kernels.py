"""The C loops of `dicp/scaffold/toy_loops.py` against the kernel interpreter, on the graphs of test_cpu_kernels.py."""

from __future__ import annotations

import functools

import pytest
import torch
from test_cpu_kernels import CASES, GUARD, close, copies, function_name, interpreted, programs
from walls import walled

from dicp.scaffold import toy_loops

pytestmark = pytest.mark.skipif(not toy_loops.compiler(), reason="needs a C compiler")


@functools.cache
def functions(name: str) -> dict[str, object]:
    kernels = {function_name(launch): launch.kernel for launch, *_ in interpreted(name)}
    return toy_loops.build("\n".join([toy_loops.RUNTIME, *(toy_loops.emit(k, n) for n, k in kernels.items())]), kernels)


@pytest.mark.parametrize("name", CASES)
def test_loops_agree_with_the_interpreter(name: str) -> None:
    for launch, before, after, sizes in interpreted(name):
        run = functions(name)[function_name(launch)]

        def call(memory: dict[str, torch.Tensor], run=run, launch=launch, sizes=sizes) -> int:
            addresses = [memory[p.name].data_ptr() for p in launch.kernel.params]
            return run(*addresses, *(sizes[v.name] for v in launch.kernel.sizes))

        mine = copies(before)
        assert call(mine) == 0
        for p in launch.kernel.params:
            close(mine[p.name][:-GUARD], after[p.name], f"{p.name} of {launch.kernel.name}")
            assert torch.equal(mine[p.name][-GUARD:], before[p.name][-GUARD:]), "wrote behind its end"
        bare = {id(t): t[:-GUARD] for t in before.values()}
        for at_end in (False, True):
            assert call(walled({n: bare[id(t)] for n, t in before.items()}, at_end)) == 0
        for out, sources in launch.in_place.items():
            for source in sources:
                a, b = before[out], before[source]
                if a is b or a.numel() != b.numel() or a.dtype.itemsize != b.dtype.itemsize:
                    continue
                shared = copies(before)
                shared[out] = shared[source].view(a.dtype)
                assert call(shared) == 0
                for n in (p.name for p in launch.kernel.params if p.written and p.name != source):
                    close(shared[n][:-GUARD], after[n], f"{n} of {launch.kernel.name}, {out} in place of {source}")


def test_a_failed_check_is_told_by_its_number() -> None:
    program, given, _ = programs("embedding")[0]
    (launch, before, _, sizes) = interpreted("embedding")[0]
    index = next(p.name for p in launch.kernel.params if p.dtype == torch.int64)
    for bad in (17, -1, 1 << 40):
        memory = copies(before)
        memory[index][2] = bad
        run = functions("embedding")[function_name(launch)]
        assert run(*(memory[p.name].data_ptr() for p in launch.kernel.params)) == 1
