"""The docs are true: their code runs, and their texts are what the compiler prints.

EXPECTTEST_ACCEPT=1 writes what it prints into the page.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^```(?P<info>[^\n]+)\n(?P<body>.*?)^```$", re.S | re.M)


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """(info string, text) of each fenced block that has an info string."""
    for m in BLOCK.finditer((DOCS / page).read_text()):
        yield m["info"], m["body"]


def plain(text: str) -> str:
    """Without times, comments and the user's lines."""
    lines = [re.sub(r"\s+# .*$", "", line) for line in text.splitlines() if not line.startswith("# ")]
    return "\n".join(lines).strip() + "\n"


BY_ONEDNN = """
import runpy
from dicp.vendor.cpu_graph import claims
claims.prefers_onednn = claims.matmul.prefers_onednn = lambda node: True
runpy.run_path("model.py", run_name="__main__")
"""  # as on the machine that the page shows, an AMD one with AVX-512


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("docs")
    (folder / "model.py").write_text(dict(blocks("pipeline.md"))["python model"])
    env = {**os.environ, "DICP_DUMP": str(folder / "dump"), "DICP_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", BY_ONEDNN],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (graph,) = (folder / "dump").iterdir()
    return {f.name: plain(f.read_text()) for f in graph.iterdir()}


SHOWN = [info.split()[1] for info, _ in blocks("pipeline.md") if info.startswith("text ")]


@pytest.mark.parametrize("name", SHOWN)
def test_pipeline_page_shows_what_is_dumped(name: str, dump: dict[str, str]) -> None:
    if os.environ.get("EXPECTTEST_ACCEPT"):
        page = (DOCS / "pipeline.md").read_text()
        head = f"```text {name}\n"
        start = page.index(head) + len(head)
        (DOCS / "pipeline.md").write_text(page[:start] + dump[name] + page[page.index("```", start) :])
    assert dict(blocks("pipeline.md"))[f"text {name}"] == dump[name]


def test_pipeline_page_shows_every_stage() -> None:
    assert SHOWN == [
        "00_import.txt",
        "15_rewrite_linear.txt",
        "30_lowered.txt",
        "40_kernels.txt",
        "50_memory.txt",
        "call.py",
    ]


def test_pipeline_page_tells_the_layers_as_they_are_tested() -> None:
    from test_layers import LAYERS

    page = " ".join((DOCS / "pipeline.md").read_text().split())
    told = re.search(r"`(config errors compat < .*?)`", page)
    assert told is not None
    for k, words in enumerate(told[1].split(" < ")):
        for word in words.split():
            name = f"dicp.{word.replace('<x>', '*')}"
            assert name in LAYERS[k + 1], (name, LAYERS[k + 1])


def test_pages_name_files_that_exist() -> None:
    missing = []
    for page in PAGES:
        for name in re.findall(
            r"`((?:dicp|test|scripts|ir|ops|passes|schedule|runtime|vendor|dynamo_bridge)/[\w./]+)`",
            page.read_text(),
        ):
            if not any((DOCS.parent / base / name).exists() for base in ("", "dicp")):
                missing.append(f"{page.name}: {name}")
    assert not missing, missing


def test_pages_link_to_pages_that_exist() -> None:
    for page in PAGES:
        for link, anchor in re.findall(r"\]\(([\w./]*)(?:#([\w-]+))?\)", page.read_text()):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name}: {link}"
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
            known = {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
            assert not anchor or anchor in known, f"{page.name}: {link}#{anchor}"


def test_grammar_lists_what_the_ir_has() -> None:
    from typing import get_args

    from dicp.ir.expr import NAMES
    from dicp.ir.kernel import _STORE_SIGN
    from dicp.ir.value import ReduceKind, ScanKind

    page = (DOCS / "pipeline.md").read_text()
    rule = dict(re.findall(r"^(\w+) +::= (.*)$", page, re.M))
    quoted = {name: re.findall(r'"([^"]+)"', text) for name, text in rule.items()}
    assert set(quoted["kind"]) == {*get_args(ReduceKind), *get_args(ScanKind)}
    assert set(quoted["store"]) == set(_STORE_SIGN.values())
    assert set(quoted["dtype"]) == set(NAMES.values())


NAME, INDEX = r"[A-Za-z_]\w*", r"\[[^=]*\]"
VALUE = rf"(?:{NAME}|\S+:\w+)"
LINES = [
    rf"kernel {NAME}\({NAME}: \w+\*?(, {NAME}: \w+\*?)*\)( sizes {NAME}(, {NAME})*)?",
    rf"  (once|for ({NAME} < [^,]+( reduced)?( serial)?(, )?)+)",
    rf"  {NAME}: \w+ = ({NAME}{INDEX}|{INDEX}|{NAME}\(.*\))",
    rf"  {NAME}(, {NAME})? = (reduce|scan) \w+ {VALUE}",
    rf"  {NAME}{INDEX} (=|\+=|\*=|max=|min=) {VALUE}(  \(duplicates\))?",
]


def test_grammar_describes_what_is_printed() -> None:
    import torch
    from lowered import compiled, text

    def f(x, i, y):
        return (
            x.cumsum(1),
            x.var(1),
            x.index_add(0, i, y),
            x[i].bfloat16(),
            x.argmax(0),
            torch.ones(()),
            x.cummax(1),
        )

    for dynamic in (False, True):
        shown = text(compiled(f, (5, 6), torch.tensor([1, 1]), (2, 6), dynamic=dynamic))
        for line in shown.splitlines():
            assert any(re.fullmatch(form, line) for form in LINES), line


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The names that docs/adding_an_op.md defines, its rows in the op table."""
    import torch

    from dicp.ops.table import Row, table

    names: dict[str, object] = {}
    for kind in ("ops", "rows", "model"):
        for info, body in blocks("adding_an_op.md"):
            if info == f"python {kind}":
                exec(body, names)
    names["demo"] = torch.ops.demo
    for value in list(names.values()):
        if isinstance(value, Row):
            for overload in value.overloads:
                monkeypatch.setitem(table(), overload, value)
    return names


@pytest.fixture
def model(demo: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    monkeypatch.setenv("DICP_CACHE_DIR", str(tmp_path))
    return demo["model"]


def test_page_on_ops_shows_the_kernel(model: object) -> None:
    from lowered import compiled, text

    shown = text(compiled(model, (4, 6)))
    path = DOCS / "adding_an_op.md"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        page = path.read_text()
        start = page.index("```text kernel\n") + len("```text kernel\n")
        path.write_text(page[:start] + shown + page[page.index("```", start) :])
    assert dict(blocks("adding_an_op.md"))["text kernel"] == shown
    assert shown.count("kernel ") == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_ops_of_the_page_agree_with_eager(model: object, dynamic: bool) -> None:
    import torch

    for n in (6, 7, 1):
        x = torch.randn(4, n)
        compiled = torch.compile(model, backend="dicp_cpu", dynamic=dynamic, options={"strict": True})
        torch.testing.assert_close(compiled(x), model(x))
        low = x.bfloat16()
        torch.testing.assert_close(compiled(low), model(low), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("block", ["python toy", "c toy_loops"])
def test_page_on_vendors_shows_what_the_examples_emit(block: str) -> None:
    from lowered import compiled

    example = importlib.import_module(f"dicp.scaffold.{block.split()[1]}")
    (launch,) = compiled(lambda x: x.exp().sum(1), (4, 8)).launches
    assert dict(blocks("adding_a_vendor.md"))[block] == example.emit(launch.kernel, "k")


def test_page_on_vendors_lists_the_whole_protocol() -> None:
    from dicp.vendor.base import Vendor

    page = (DOCS / "adding_a_vendor.md").read_text()
    table = page[page.index("| `name`") : page.index("The smallest vendor")]
    told = set(re.findall(r"`(\w+)[`(]", table))
    protocol = {n for n in (*Vendor.__annotations__, *vars(Vendor)) if not n.startswith("_")}
    assert protocol <= told, protocol - told
