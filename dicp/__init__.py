"""dicp: a torch.compile backend, and a kit for making one. Importing it loads nothing heavy, not even
torch."""

import importlib
import sys
import types
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "backend", "explain", "precompile", "refresh_frozen", "release_memory"]


def backend(vendor: Any) -> Any:
    """The backend of a vendor: `torch.compile(model, backend=dicp.backend("toy"))`. `vendor`: the name of an
    installed one, or the vendor itself. Raises DicpError, naming near matches."""
    return importlib.import_module("dicp.dynamo_bridge.backend").backend_for(vendor)


def precompile(model: Any, example_inputs: Any, sizes: Any = None, **given: Any) -> Any:
    """Compile a model for these sizes ahead of the first request; see `dicp.ahead.precompile`."""
    return importlib.import_module("dicp.ahead").precompile(model, example_inputs, sizes, **given)


def refresh_frozen() -> None:
    """Have what depends on weights alone computed anew at the next call of every function compiled with
    `options={"freeze": True}`: after changes that leave no trace, through `.data` or a raw pointer."""
    importlib.import_module("dicp.runtime.frozen").refresh()


def release_memory() -> None:
    """Give back the memory that compiled programs keep between calls only to use it again (on the CPU:
    workspaces, and large results that the caller has dropped). Calls that run keep theirs."""
    for module, pool in (("arena", "ARENA"), ("pool", "POOL")):
        loaded = sys.modules.get(f"dicp.runtime.{module}")
        if loaded is not None:
            getattr(loaded, pool).clear()


class _Package(types.ModuleType):
    """This package. A class, since `dicp.explain` is both a function and the module that holds it: loading
    the module binds the attribute, so only a property keeps `dicp.explain(model, x)` callable
    afterwards."""

    @property
    def explain(self) -> Any:
        """`explain(model, *args, **kwargs)`: what a compile of `model` did, as a report that prints."""
        return importlib.import_module("dicp.explain").explain

    @explain.setter
    def explain(self, module: types.ModuleType) -> None:
        pass  # the import system binding the submodule


sys.modules[__name__].__class__ = _Package
