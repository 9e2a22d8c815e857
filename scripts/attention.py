"""Gradients of attention by ATen's flash kernels and by tiles (dicp_attention_grad.h), in turns: milliseconds
of a call, and GF/s of the five products as written.

    python scripts/attention.py
"""

from __future__ import annotations

import torch

from dicp.bench.measure import alternating

SHAPES = [  # batch, heads, rows, depth, causal
    (1, 16, 128, 64, True),
    (2, 12, 512, 64, False),
    (1, 6, 1500, 64, False),
    (4, 12, 197, 64, False),
    (1, 12, 1024, 64, True),
    (1, 2, 4096, 128, True),
]
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.no_grad()
def measure(dtype: torch.dtype, batch: int, heads: int, rows: int, depth: int, causal: bool) -> None:
    q, k, v, grad = (torch.randn(batch, rows, heads, depth).to(dtype).transpose(1, 2) for _ in range(4))
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    given = (grad, q, k, v, out, log_sum, 0.0, causal)
    torch._dynamo.reset()
    compiled = torch.compile(BACKWARD, backend="dicp_cpu")
    compiled(*given)
    theirs, ours = alternating([lambda: BACKWARD(*given), lambda: compiled(*given)])
    operations = 10e-6 * batch * heads * rows * rows * depth * (0.5 if causal else 1.0)
    what = f"{batch} x {heads} heads, {rows} rows, depth {depth}{', causal' if causal else ''}"
    print(
        f"{str(dtype)[6:]:8} {what:45} ATen {theirs:6.2f} ms {operations / theirs:4.0f} GF/s, "
        f"dicp_cpu {ours:6.2f} ms {operations / ours:4.0f} GF/s, {theirs / ours:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            measure(dtype, *shape)
