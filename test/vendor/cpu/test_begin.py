"""Templates compile while the core still schedules kernels and plans memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dicp.vendor.cpu_graph.assemble import SegmentWriter
from dicp.vendor.cpu_graph.build import Build, Unit


class Block(nn.Module):
    """What claims serve by templates: windows of 3, attention, a gated product, one row times a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, padding=1)
        self.depth = nn.Conv2d(64, 64, 7, padding=3, groups=64)
        self.qkv, self.up, self.out = nn.Linear(64, 192), nn.Linear(64, 256), nn.Linear(256, 64)
        self.table = nn.Embedding(50, 64)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = F.relu(self.depth(self.conv(x))).flatten(2).transpose(1, 2) + self.table(tokens)
        q, k, v = self.qkv(rows).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(F.silu(self.up(mixed))) + self.out(F.silu(self.up(mixed[:, :1])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_what_begins_is_what_the_program_calls(
    training: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    begun, needed = set[str](), set[str]()
    begin, template = Build.begin, SegmentWriter.template

    def noting(self: Build, units: Sequence[Unit]) -> None:
        begun.update(u.source for u in units)
        begin(self, units)

    def called(self: SegmentWriter, function: str, parameters: str, source: str, *effort: Any) -> str:
        if self.name != "unplanned":
            needed.add(source)
        return template(self, function, parameters, source, *effort)

    monkeypatch.setattr(Build, "begin", noting)
    monkeypatch.setattr(SegmentWriter, "template", called)
    model = Block().to(dtype)
    x, tokens = torch.randn(2, 64, 16, 16, dtype=dtype), torch.randint(50, (2, 256))
    compiled = torch.compile(model, backend="dicp_cpu", options={"cache_dir": str(tmp_path)})
    with torch.set_grad_enabled(training):
        y = compiled(x, tokens)
    if training:
        y.float().square().mean().backward()
    assert begun == needed and begun
