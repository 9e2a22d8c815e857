"""The C loops of `dicp/scaffold/toy_loops.py` against the kernel interpreter, on the graphs of test_cpu_kernels.py."""

from __future__ import annotations

import functools

import pytest
import torch
from test_cpu_kernels import CASES, check_launch, copies, function_name, interpreted, programs

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

        check_launch(launch, call, before, after)


def test_a_failed_check_is_told_by_its_number() -> None:
    program, given, _ = programs("embedding")[0]
    (launch, before, _, sizes) = interpreted("embedding")[0]
    index = next(p.name for p in launch.kernel.params if p.dtype == torch.int64)
    for bad in (17, -1, 1 << 40):
        memory = copies(before)
        memory[index][2] = bad
        run = functions("embedding")[function_name(launch)]
        assert run(*(memory[p.name].data_ptr() for p in launch.kernel.params)) == 1
