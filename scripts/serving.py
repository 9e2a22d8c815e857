"""A module in a file of its own, so that a compiled function of it can be saved and found again."""

from typing import Any

from torch import Tensor, nn


class Scores(nn.Module):
    """A model whose inputs but one are defaults: that one in, its scores out."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name
        if hasattr(model, "config"):
            model.config.use_cache = False

    def forward(self, x: Tensor) -> Any:
        out = self.model(**{self.name: x})
        return out if isinstance(out, Tensor) else out.logits
