"""PyTorch's operator database against eager: CI's slice of it, or with --op one operator in every dtype.

All units run first, in two isolated processes; each test then asks for its own result.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dicp.conformance import expected
from dicp.conformance.plan import Plan
from dicp.conformance.pool import Pool
from dicp.conformance.unit import Unit, UnitResult

Results = dict[str, UnitResult]


def selected(config: pytest.Config) -> list[Unit]:
    """The units this session asks for."""
    name = config.getoption("--op", "")
    if not name:
        from ci_slice import ci_units

        return ci_units()
    dynamic = config.getoption("--op-dynamic", "false")
    plan = Plan(
        "^" + name.replace(".", r"\.") + "$",
        dynamic=dynamic != "false",
        static=dynamic != "true",
        gradient=True,
    )
    units = plan.units()
    if not units:
        raise pytest.UsageError(f"no operator named {name!r} in PyTorch's operator database")
    return units


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "unit" in metafunc.fixturenames:
        units = selected(metafunc.config)
        metafunc.parametrize("unit", units, ids=[u.key for u in units])


@pytest.fixture(scope="session")
def results(
    request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """Results of every selected unit."""
    found: Results = {}
    wanted = {
        item.callspec.params["unit"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and "unit" in item.callspec.params
    }
    workers = min(len(os.sched_getaffinity(0)), 4, max(len(wanted), 1))
    modules = ("toy_backends",) if backend == "toy" else ()
    pool = Pool(backend, modules, workers, 120.0, Path(tmp_path_factory.mktemp("workers")))
    pool.run(sorted(wanted, key=lambda u: u.key), lambda r: found.__setitem__(r.key, r))
    return found


def test_as_eager(unit: Unit, results: Results, backend: str) -> None:
    """Every case of the unit does what eager does."""
    result = results[unit.key]
    assert not result.error, result.error
    wrong = [c for c in result.cases if c.status == "fail"]
    reason = expected.reason_for(backend, unit.op, expected.kind_of(unit.key))
    if reason is not None and wrong:
        pytest.xfail(reason)
    assert not wrong, "\n" + "\n".join(f"{c.id} [{c.check}] {c.call}\n    {c.message}" for c in wrong[:8])
