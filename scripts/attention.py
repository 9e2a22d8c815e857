"""Attention and its gradients by ATen's flash kernels and by tiles (dicp_attention.h, dicp_attention_grad.h),
in turns: milliseconds of a call, and GF/s of the two or five products as written.

    python scripts/attention.py
"""

from __future__ import annotations

import functools

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
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.no_grad()
def measure(dtype: torch.dtype, batch: int, heads: int, rows: int, depth: int, causal: bool) -> None:
    q, k, v, grad = (torch.randn(batch, rows, heads, depth).to(dtype).transpose(1, 2) for _ in range(4))
    out, log_sum = FORWARD(q, k, v, 0.0, causal)
    what = f"{batch} x {heads} heads, {rows} rows, depth {depth}{', causal' if causal else ''}"
    operations = 2e-6 * batch * heads * rows * rows * depth * (0.5 if causal else 1.0)
    backward = (grad, q, k, v, out, log_sum, 0.0, causal)
    for name, fn, given, products in (
        ("forward", FORWARD, (q, k, v, 0.0, causal), 2),
        ("gradient", BACKWARD, backward, 5),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="dicp_cpu")
        compiled(*given)
        calls = [functools.partial(call, *given) for call in (fn, compiled)]
        theirs, ours = alternating(calls)
        done = products * operations
        print(
            f"{str(dtype)[6:]:8} {name:8} {what:45} ATen {theirs:6.2f} ms {done / theirs:4.0f} GF/s, "
            f"dicp_cpu {ours:6.2f} ms {done / ours:4.0f} GF/s, {theirs / ours:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            measure(dtype, *shape)
