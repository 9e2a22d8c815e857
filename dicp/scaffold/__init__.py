"""A new vendor's package, to start from: the worked example of docs/adding_a_vendor.md under another name,
with its entry points and tests.

The examples are modules of this package, toy.py, toy_loops.py and toy_graph.py, and run as they are; what is
written is their text, with their names replaced.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from string import Template
from typing import Literal

from dicp.errors import OptionError
from dicp.vendor import names as vendor_names

HERE = Path(__file__).parent
Kind = Literal["kernels", "loops", "graphs"]
"""What the vendor's toolchain takes: kernels of whole tensors, kernels as loops in C, or graphs."""
EXAMPLES: dict[Kind, str] = {"kernels": "toy", "loops": "toy_loops", "graphs": "toy_graph"}
_CHIPS: dict[Kind, str] = {
    "kernels": "torch itself",
    "loops": "this machine, by its C compiler",
    "graphs": "NumPy",
}

_PYPROJECT = Template("""\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
dependencies = ["dicp"]

[project.entry-points."dicp.vendors"]
$name = "$name:vendor"

[project.entry-points."torch_dynamo_backends"]
$name = "$name:backend"

[tool.setuptools]
packages = ["$name"]
# The default, and yet it makes `pip install -e` use a path file: an import hook would lose against this very
# folder, which has the package's name, where Python is started beside it.
package-dir = { "" = "." }
""")

_README = Template("""\
# $name

A vendor of dicp: `torch.compile(model, backend="$name")`.

```bash
pip install -e .                             # where dicp is installed
python -m pytest tests
python -m dicp.conformance --vendor $name --ops '^(add|sum|softmax|nn.functional.linear)$$'
python -m dicp.conformance --vendor $name --dynamic --grad --resume run --html run/report.html
```

Everything works already, on a chip that is $chip. Make it yours in `$name/__init__.py`, and run the tests
after each step:

$steps

dicp's docs/adding_a_vendor.md tells what each function owes, docs/conformance.md what the suite compares.
""")

_STEPS: dict[Kind, str] = {
    "kernels": """\
1. `available`: what is missing, and what to do, where your driver or compiler is not there.
2. `WORDS`, `spelled` and `place`: how your language spells a primitive and a position. Then `emit`: a kernel.
3. `assemble`: compile, load, call. `device`, once tensors live on it.
4. `fingerprint`: text that changes with your compiler, or programs of the old one are found in caches.
5. `CLAIMS`: the ops that your libraries do better, one at a time.
6. `machine`: threads, lanes, cache: what fusion is measured by.""",
    "loops": """\
1. `compiler` and `available`: your kernel compiler's command; what is missing, and what to do, without it.
2. `RUNTIME` and `build`: what your compiler needs before kernels and on its command line, and how their
   functions are loaded and called. `device`, once tensors live on it.
3. `WORDS`, `INTEGERS`, `FOLDS`, `TYPES`: how your language spells primitives, reductions and dtypes. Then
   `emit`: the outer loops become your chip's threads. `words` are the names that have a spelling.
4. `fingerprint`: text that changes with your compiler, or programs of the old one are found in caches.
5. `CLAIMS`: the ops that your libraries do better, one at a time.
6. `machine`: threads, lanes, cache: what fusion is measured by.""",
    "graphs": """\
1. `available`: what is missing, and what to do, where your driver or compiler is not there.
2. `CALLS`, `DTYPES` and `supports`: which calls your toolchain takes. Every other runs in eager PyTorch, and
   `dicp.explain` lists it.
3. `build` and `Tape`: your toolchain's compile, and the function of what it made. `device`, once tensors live
   on it.
4. `fingerprint`: text that changes with your toolchain, or programs of the old one are found in caches.""",
}


def render(name: str, kind: Kind = "kernels") -> dict[str, str]:
    """The package's files by path."""
    example = EXAMPLES[kind]

    def renamed(text: str) -> str:
        text = text.replace(f"from dicp.scaffold import {example}\n", f"import {name}\n")
        text = re.sub(rf"\b{example}\b", name, text)
        return text.replace(_camel(example), _camel(name))

    checks = (HERE / "checks.py").read_text().replace("toy", example)
    return {
        "pyproject.toml": _PYPROJECT.substitute(name=name),
        "README.md": _README.substitute(name=name, chip=_CHIPS[kind], steps=_STEPS[kind]),
        f"{name}/__init__.py": renamed((HERE / f"{example}.py").read_text()),
        f"tests/test_{name}.py": renamed(checks),
    }


def write(name: str, into: Path, kind: Kind = "kernels") -> Path:
    """Write the package into a new folder of its name. Raises OptionError for a name that cannot be a
    module's or is taken, FileExistsError."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise OptionError(f"{name!r} cannot be a package's name", todo="use lower-case letters, digits and _")
    if importlib.util.find_spec(name) is not None:
        raise OptionError(f"there is a module {name!r} already", todo="choose another name")
    if name in vendor_names():
        raise OptionError(f"there is a vendor {name!r} already", todo="choose another name")
    folder = into / name
    folder.mkdir(parents=True)
    for path, text in render(name, kind).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    return folder


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


__all__ = ["EXAMPLES", "Kind", "render", "write"]
