"""The fuzzer's rules of networks: contractions, convolutions, pools, norms, attention, losses, tables."""

from __future__ import annotations

import random

import torch

from .fuzz_ops import Answer, Rule, dim_of, is_float, is_index, one_of

# ---- contractions ----


def _matmul(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    a, b = t
    if a.dtype != b.dtype or not is_float(a) or 0 in a.shape or 0 in b.shape:
        return None
    if a.dim() >= 1 and b.dim() == 2 and a.shape[-1] == b.shape[1] and rng.random() < 0.5:
        return one_of(
            rng,
            "F.linear({0}, {1})",
            "F.relu(F.linear({0}, {1}))",
            "F.gelu(F.linear({0}, {1})) + F.linear({0}, {1}).flip(-1)",
            "F.linear({0}, {1}).flip(0) + F.silu(F.linear({0}, {1}, {1}[:, 0]))",
            "{0} @ {1}.mT",
            "F.linear({0}, {1}, {1}[:, 0])",
        )
    if a.dim() >= 1 and b.dim() >= 1 and a.shape[-1] == b.shape[-2 if b.dim() > 1 else -1]:
        return one_of(rng, "{0} @ {1}", "torch.matmul({0}, {1}) * 0.5")
    if a.dim() == b.dim() >= 2 and a.shape[-1] == b.shape[-1] and a.shape[:-2] == b.shape[:-2]:
        return one_of(
            rng,
            "{0} @ {1}.mT",
            "torch.softmax({rounded}({0} @ {1}.mT), -1) @ {1}",
            "F.scaled_dot_product_attention({0}, {1}, {1})" if a.dim() >= 3 else "{0} @ {1}.mT",
        )
    return None


def _spatial(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if x.dim() != 4 or not is_float(x) or min(x.shape[-2:]) < 3 or x.dtype == torch.float16:
        return None
    return one_of(
        rng,
        "F.max_pool2d({0}, 2)",
        "F.avg_pool2d({0}, 2)",
        "F.avg_pool2d({0}, 3, 1, 1)",
        "F.adaptive_avg_pool2d({0}, 1)",
        "F.interpolate({0}, scale_factor=2)",
        "F.max_pool2d({0}, 3, 2, 1)",
        "{0}.mean((-1, -2))",
        "F.conv2d({0}, torch.ones(2, {0}.shape[1], 3, 3, dtype={0}.dtype), padding=1)",
    )


def _weight(*shape: str) -> str:
    """A tensor of small numbers of few bits, of operand 0's dtype, that is neither constant nor symmetric."""
    count = " * ".join(shape)
    return f"((torch.arange({count}) % 7 - 2).to({{0}}.dtype) / 4).reshape({', '.join(shape)})"


def _convolution(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if not is_float(x) or x.dtype == torch.float16 or x.dim() < 3 or x.numel() == 0 or x.shape[1] > 16:
        return None
    channels, k = "{0}.shape[1]", rng.choice((1, 2, 3))
    if x.dim() == 3 and x.shape[2] >= 3:
        w = _weight("4", channels, str(k))
        return one_of(
            rng,
            f"F.conv1d({{0}}, {w})",
            f"F.conv1d({{0}}, {w}, stride=2, padding=1)",
            f"F.conv1d({{0}}, {w}).relu()",
            f"F.conv_transpose1d({{0}}, {_weight(channels, '2', str(k))}, stride=2)",
        )
    if x.dim() != 4 or min(x.shape[2:]) < 3:
        return None
    w = _weight("4", channels, str(k), str(k))
    depthwise = _weight(channels, "1", str(k), str(k))
    return one_of(
        rng,
        f"F.conv2d({{0}}, {w})",
        f"F.conv2d({{0}}, {w}, torch.ones(4, dtype={{0}}.dtype), padding=1).relu()",
        f"F.conv2d({{0}}, {w}, stride=2, padding=1)",
        f"F.conv2d({{0}}, {w}, padding=2, dilation=2)" if k > 1 else f"F.conv2d({{0}}, {w}) * 0.5",
        f"F.silu(F.conv2d({{0}}, {depthwise}, padding=1, groups={channels}))",
        f"F.conv2d({{0}}.to(memory_format=torch.channels_last), {w}, padding=1)",
        f"F.conv_transpose2d({{0}}, {_weight(channels, '2', str(k), str(k))}, stride=2)",
    )


def _norm(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if not is_float(x) or x.dim() < 2 or x.numel() == 0:
        return None
    c = "{0}.shape[1]"
    texts = [
        f"F.batch_norm({{0}}, torch.zeros({c}, dtype={{0}}.dtype), torch.ones({c}, dtype={{0}}.dtype))",
        f"F.layer_norm({{0}}, {{0}}.shape[-1:], {_weight('{0}.shape[-1]')})",
        "F.layer_norm({0}, {0}.shape[-2:])",
    ]
    if x[0].numel() > 8:  # of few elements what is left of their differences is rounding
        texts += [f"F.group_norm({{0}}, 1, {_weight(c)})"]
    if x.numel() > 8 * x.shape[1]:
        texts += [f"F.batch_norm({{0}}, None, None, {_weight(c)}, training=True, eps=0.1)"]
    if x.dim() > 2 and x[0, 0].numel() > 8:
        texts += ["F.instance_norm({0}, eps=0.1)", f"F.group_norm({{0}}, {c}, eps=0.1)"]
    return rng.choice(texts)


def _resize(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if not is_float(x) or x.dtype == torch.float16 or x.dim() != 4 or min(x.shape[2:]) < 2 or x.numel() == 0:
        return None
    texts = [
        "F.interpolate({0}, scale_factor=2, mode='bilinear')",
        "F.interpolate({0}, size=(3, 5), mode='bilinear', align_corners=True)",
        "F.interpolate({0}, scale_factor=1.5, mode='bicubic')",
        "F.interpolate({0}, size=5, mode='nearest-exact')",
        "F.unfold({0}, 2)",
        "F.adaptive_avg_pool2d({0}, (2, 3))",
        "F.lp_pool2d({0}.abs() + 1, 2, 2)",
        "F.pixel_unshuffle({0}[..., :2, :2], 2)",
        "F.channel_shuffle({0}, 1)",
        "F.avg_pool2d({0}, 2, ceil_mode=True)",
    ]
    if x.shape[1] % 4 == 0:
        texts += ["F.pixel_shuffle({0}, 2)"]
    if x.shape[1] % 2 == 0:
        texts += ["F.glu({0}, 1)", "F.channel_shuffle({0}, 2)"]
    return rng.choice(texts)


def _attention(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    q, k = t
    if not is_float(q) or q.dtype != k.dtype or q.dim() != k.dim() or q.dim() < 3 or not q.numel():
        return None
    if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1] or not k.numel():
        return None
    texts = [
        "F.scaled_dot_product_attention({0}, {1}, {1})",
        "F.scaled_dot_product_attention({0}, {1}, -{1}, is_causal=True)",
        "F.scaled_dot_product_attention({0}, {1}, {1} * 0.5, scale=0.25)",
        "F.scaled_dot_product_attention({0}, {1}, {1}, "
        "attn_mask=torch.ones({0}.shape[-2], {1}.shape[-2], dtype=torch.bool).tril())",
        "F.scaled_dot_product_attention({0}, {1}, {1}, "
        "attn_mask=(torch.arange({1}.shape[-2]) % 3).to({0}.dtype) * -0.5)",
        "torch.softmax(({rounded}({0} @ {1}.mT) / 2).tril(), -1) @ {1}",
    ]
    return rng.choice(texts)


def _einsum(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    a, b = t
    if not is_float(a) or a.dtype != b.dtype or 0 in (*a.shape, *b.shape):
        return None
    if a.dim() == b.dim() == 2:
        texts = [
            text
            for text, fits in (
                ("torch.einsum('ij,kj->ik', {0}, {1})", a.shape[1] == b.shape[1]),
                ("torch.einsum('ij,ik->jk', {0}, {1})", a.shape[0] == b.shape[0]),
                ("torch.einsum('ij,ij->i', {0}, {1})", a.shape == b.shape),
                ("torch.einsum('ij,jk->ki', {0}, {1})", a.shape[1] == b.shape[0]),
            )
            if fits
        ]
        return rng.choice(texts) if texts else None
    if a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[2]:
        return one_of(rng, "torch.einsum('bij,bkj->ikb', {0}, {1})", "torch.bmm({0}, {1}.mT)")
    if a.dim() == b.dim() == 1:
        return one_of(rng, "torch.outer({0}, {1})", "torch.einsum('i,j->ij', {0}, {1})")
    return None


def _loss(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    a, b = t
    if not is_float(a) or a.shape != b.shape or a.dtype != b.dtype or not a.numel():
        return None
    texts = [
        "F.mse_loss({0}, {1})",
        "F.smooth_l1_loss({0}, {1}, reduction='sum')",
        "F.huber_loss({0}, {1}, reduction='none')",
        "F.binary_cross_entropy_with_logits({0}, torch.sigmoid({1}))",
        "F.soft_margin_loss({0}, {1})",
    ]
    if a.dim() == 2:
        texts += [
            "F.cross_entropy({0}, torch.arange({0}.shape[0]) % {0}.shape[1])",
            "F.cross_entropy({0}, torch.softmax({1}, -1), label_smoothing=0.1)",
            "F.nll_loss(torch.log_softmax({0}, -1), torch.arange({0}.shape[0]) % {0}.shape[1])",
            "F.kl_div({rounded}(F.log_softmax({0}, -1)), {rounded}(F.softmax({1}, -1)), reduction='sum')",
            "F.cosine_similarity({0} + 2, {1} - 3)",
        ]
    return rng.choice(texts)


def _table(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x, i = t
    if not is_float(x) or x.dim() != 2 or not x.numel() or not is_index(i) or not i.numel() or i.dim() > 2:
        return None
    at = "({1} % {0}.shape[0]).long()"
    texts = [
        f"F.embedding({at}, {{0}})",
        f"F.embedding({at}, {{0}}, padding_idx=0)",
        f"torch.zeros_like({{0}}).index_put(({at},), {{0}}[{at}], accumulate=True)",
    ]
    if i.dim() == 2:
        texts += [f"F.embedding_bag({at}, {{0}}, mode='{rng.choice(('sum', 'mean', 'max'))}')"] * 2
    return rng.choice(texts)


def _ranked(rng: random.Random, t: list[torch.Tensor]) -> Answer:
    x = t[0]
    if not is_float(x) or x.dim() == 0 or not x.numel():
        return None
    d = dim_of(rng, x)
    return one_of(
        rng,
        f"torch.topk({{0}}, 1, {d})[0]",
        f"torch.sort({{0}}, {d}, descending=True)[0]",
        f"torch.logcumsumexp({{0}}, {d})",
        f"torch.kthvalue({{0}}, 1, {d})[0]",
        f"torch.diff({{0}}, dim={d})",
        f"torch.trapezoid({{0}}, dim={d})",
        "torch.bucketize({0}, torch.tensor([-1.0, 0.0, 1.0]).to({0}.dtype))",
        "F.one_hot(({0}.abs() * 2).long() % 4, 4)",
        "torch.histc({0}.float(), 4, -2, 2)",
        "{0}[{0} > 0]",
        "torch.masked_select({0}, {0} <= 0.5)",
        "torch.nonzero({0} > 0)",
    )


RULES: tuple[Rule, ...] = (
    Rule("matmul", 2, _matmul, weight=4),
    Rule("einsum", 2, _einsum, weight=2),
    Rule("spatial", 1, _spatial, weight=2),
    Rule("convolution", 1, _convolution, weight=2),
    Rule("norm", 1, _norm, weight=2),
    Rule("resize", 1, _resize, weight=1.5),
    Rule("attention", 2, _attention, weight=2),
    Rule("loss", 2, _loss, weight=1.5),
    Rule("table", 2, _table, weight=1.5),
    Rule("ranked", 1, _ranked, exact=True, exact_in=True, weight=1.5),
)
