"""Elementwise rows: activation functions and their backwards."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dicp.ops import scalar as s
from dicp.ops.table import Row, elementwise


def rows() -> Iterator[Row]:
    aten = torch.ops.aten
    yield elementwise("relu", aten.relu.default, body=lambda x: s.maximum(x, 0))
