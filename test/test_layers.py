"""Imports point one way, and private torch lives in one module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "dicp"

# Lowest first; a module may import its own layer and those before it. docs/pipeline.md says the same.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("dicp", "dicp.autoload"),
    ("dicp.config", "dicp.errors", "dicp.compat"),
    ("dicp.ir",),
    ("dicp.ops",),
    ("dicp.vendor", "dicp.vendor.base", "dicp.vendor.asking"),
    ("dicp.passes",),
    ("dicp.schedule",),
    ("dicp.runtime",),
    ("dicp.tuning",),
    ("dicp.vendor.*",),
    ("dicp.compiler",),
    ("dicp.dynamo_bridge",),
    ("dicp.explain", "dicp.cache", "dicp.info", "dicp.bench", "dicp.ahead", "dicp.conformance"),
    ("dicp.scaffold",),
)
# Inside one layer, folders named here import each other in this order only.
FOLDERS = ("dicp.vendor.cpu_graph", "dicp.vendor.cuda_graph")

# (importer, imported): why a line may point up.
EXCEPTIONS = {
    ("dicp.autoload", "dicp.runtime.artifact"): "loaded when torch hands a saved artifact back",
    ("dicp.info", "dicp.vendor.cpu_graph"): "reports the compiler that vendor found",
}

# Underscored torch modules and fx internals, allowed outside compat: why.
PRIVATE = {
    (
        "dicp.autoload",
        "torch._logging._internal",
    ): "runs inside `import torch`: compat would import all of torch",
    ("dicp.autoload", "torch.compiler._cache"): "likewise",
    ("dicp.conformance", "torch"): "a test kit: it reads torch's own test samples (torch.testing._internal)",
}
SYMBOLS = (
    "torch.fx.experimental",
    "torch.utils._sympy",
)  # how torch itself spells symbolic sizes; no public names


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, ast.parse(path.read_text(), str(path))


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Every module or name imported, at the top or inside a function, as a dotted path."""
    package = (
        name if (ROOT.parent / name.replace(".", "/") / "__init__.py").exists() else name.rpartition(".")[0]
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{a.name}" for a in node.names)


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def layer(name: str) -> int:
    """The layer of a module: the longest prefix that is listed."""
    best, rank = "", -1
    for k, members in enumerate(LAYERS):
        for m in members:
            exact = m in ("dicp", "dicp.vendor")
            hit = name == m if exact else under(name, m.removesuffix(".*"))
            if hit and len(m) > len(best) and not (m == "dicp.vendor.*" and under(name, "dicp.vendor.base")):
                best, rank = m, k
    assert rank >= 0, f"{name} is in no layer"
    return rank


def allowed(importer: str, imported: str, table: dict[tuple[str, str], str]) -> bool:
    return any(
        under(importer, a) and (a != "dicp" or importer == "dicp") and under(imported, b) for a, b in table
    )


NAMES = {name for name, _ in modules()}


def module_of(path: str) -> str:
    """The dicp module that a dotted path (perhaps of a name inside it) belongs to."""
    while path not in NAMES and "." in path:
        path = path.rpartition(".")[0]
    return path


def test_imports_point_down() -> None:
    wrong = []
    for name, tree in modules():
        for path in imports(name, tree):
            if under(path, "dicp"):
                target = module_of(path)
                if layer(target) > layer(name) and not allowed(name, target, EXCEPTIONS):
                    wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_exceptions_are_needed() -> None:
    found = [(name, module_of(path)) for name, tree in modules() for path in imports(name, tree)]
    unused = [k for k in EXCEPTIONS if not any(allowed(*f, {k: ""}) for f in found)]
    assert not unused, unused


def test_no_core_module_names_a_vendor() -> None:
    """Vendors are found through their entry points; one vendor does not import another."""
    wrong = []
    for name, tree in modules():
        for path in imports(name, tree):
            for vendor in FOLDERS:
                if under(path, vendor) and not under(name, vendor) and not allowed(name, path, EXCEPTIONS):
                    wrong.append(f"{name} imports {path}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def is_private(path: str) -> bool:
    if not under(path, "torch"):
        return under(path, "functorch")
    return any(part.startswith("_") and not part.startswith("__") for part in path.split(".")[1:])


# torch's own spelling of its public op and pytree types
PUBLIC_ENOUGH = ("torch._ops.OpOverload", "torch.utils._pytree")


def test_private_torch_is_imported_in_compat_only() -> None:
    wrong = []
    for name, tree in modules():
        if under(name, "dicp.compat"):
            continue
        for path in imports(name, tree):
            free = any(under(path, p) for p in (*PUBLIC_ENOUGH, *SYMBOLS))
            if is_private(path) and not free and not allowed(name, path, PRIVATE):
                wrong.append(f"{name} imports {path}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def private_attributes(tree: ast.Module) -> Iterator[str]:
    """torch._x.y written out, without an import."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            yield f"torch.{node.attr}"


def test_private_torch_is_named_in_compat_only() -> None:
    wrong = [
        f"{name} uses {what}"
        for name, tree in modules()
        if not under(name, "dicp.compat") and not under(name, "dicp.conformance")
        for what in private_attributes(tree)
        if what not in ("torch._ops",)
    ]
    assert not wrong, "\n".join(sorted(set(wrong)))


@pytest.mark.parametrize("what", ["environ", "getenv"])
def test_environment_is_read_in_config_only(what: str) -> None:
    """DICP_* variables: nobody but config reads them (os.environ is passed on to the processes that dicp starts)."""
    wrong = [
        name
        for name, tree in modules()
        if name != "dicp.config" and not under(name, "dicp.conformance")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("DICP_")
        and node.value.isupper()
        and what in ast.dump(tree)
    ]
    assert not wrong, sorted(set(wrong))


def test_vendors_are_asked_through_their_types() -> None:
    """A misspelt name is then an error of types: what a vendor may leave out has its default in vendor/base.py."""
    wrong = [
        f"{name}:{call.lineno} {ast.unparse(call)}"
        for name, tree in modules()
        if not under(name, "dicp.vendor")
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("getattr", "hasattr")
        if "vendor" in ast.unparse(call.args[0]).rpartition(".")[2]
    ]
    assert not wrong, wrong


def test_no_bare_except_and_no_assert_false() -> None:
    wrong = []
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{name}:{node.lineno} bare except")
            if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and not node.test.value:
                wrong.append(f"{name}:{node.lineno} assert False")
    assert not wrong


def test_reversed_node_lists_are_not_used_as_iterators() -> None:
    """torch 2.11's are iterable only: `next(iter(reversed(graph.nodes)))`."""
    for name, tree in modules():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "next":
                text = ast.unparse(call.args[0])
                assert not (text.startswith("reversed(") and text.endswith(".nodes)")), (name, call.lineno)
