"""Who takes part: eager PyTorch, Inductor in its modes, dicp in its."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp import compat

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Contestant:
    """A way of running a model. `backend` None: as it is. `options` are torch.compile's for inference, and
    `training` those for training; None where it has no mode of its own there."""

    name: str
    backend: str | None
    options: Options = field(default_factory=dict)
    training: Options | None = field(default_factory=dict)

    def compiler(self, training: bool, **how: Any) -> Callable[[Any], Any]:
        """Function or module to what is called in its stead; `how` is handed to torch.compile."""
        if self.backend is None:
            return lambda model: model
        options = dict((self.training if training else self.options) or {})

        def compile(model: Any) -> Any:
            compiled = torch.compile(model, backend=self.backend, options=options or None, **how)
            return _first_calls_freezing(compiled) if options.get("freezing") else compiled

        return compile

    def load(self) -> None:
        """Import what its compiler needs: imports are not compile time."""
        if self.backend is not None:
            compat.load_backend(self.backend)

    @property
    def is_dicp(self) -> bool:
        return self.backend is not None and self.backend.startswith("dicp")


FIRST_CALLS = 4  # as many as may compile: a prompt, a token, and each once more


def _first_calls_freezing(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo asks Inductor's setting, not torch.compile's options, whether weights are constants: with the
    option alone nothing is frozen. Set while calls compile, so that those that are timed cost no more."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > FIRST_CALLS:
            return compiled(*args, **kwargs)
        with compat.inductor_freezing():
            return compiled(*args, **kwargs)

    return call


# Inductor's tuned products for CPUs are for constant weights, so they come with freezing where weights are.
# dicp's max-autotune does as well: each in its best configuration.
_TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
_GRAPHS = {"triton.cudagraphs": True}  # what mode="reduce-overhead" sets
_KNOWN = (
    Contestant("eager", None),
    Contestant("inductor", "inductor"),
    Contestant("inductor-freezing", "inductor", {"freezing": True}, None),
    Contestant("inductor-max-autotune", "inductor", {**_TUNED, "freezing": True}, _TUNED),
    Contestant("dicp_cpu", "dicp_cpu"),
    Contestant("dicp_cpu-freeze", "dicp_cpu", {"freeze": True}, None),
    Contestant(
        "dicp_cpu-max-autotune", "dicp_cpu", {"max_autotune": True, "freeze": True}, {"max_autotune": True}
    ),
    Contestant("inductor-graphs", "inductor", _GRAPHS, _GRAPHS),
    Contestant("inductor-graphs-max-autotune", "inductor", {**_GRAPHS, **_TUNED}, {**_GRAPHS, **_TUNED}),
    Contestant("dicp_cuda", "dicp_cuda"),
    Contestant("dicp_cuda-graphs", "dicp_cuda", {"cuda_graphs": True}, {"cuda_graphs": True}),
    Contestant(
        "dicp_cuda-graphs-max-autotune",
        "dicp_cuda",
        {"cuda_graphs": True, "max_autotune": True},
        {"cuda_graphs": True, "max_autotune": True},
    ),
)
CONTESTANTS = {c.name: c for c in _KNOWN}
STANDARD = (
    "eager",
    "inductor",
    "inductor-freezing",
    "inductor-max-autotune",
    "dicp_cpu",
    "dicp_cpu-freeze",
    "dicp_cpu-max-autotune",
)
ON_GPU = ("eager", "inductor", "inductor-graphs", "dicp_cuda", "dicp_cuda-graphs")


def get(name: str) -> Contestant:
    """The contestant of that name, or torch.compile with the backend of that name."""
    return CONTESTANTS.get(name) or Contestant(name, name)


def known(name: str) -> bool:
    """Whether `get` gives something that can run."""
    return name in CONTESTANTS or name in torch.compiler.list_backends(exclude_tags=())
