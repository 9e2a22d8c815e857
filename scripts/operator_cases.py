"""Single operators at sizes of real models, for scripts/operators.py: what is called, and on which inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from operator_inputs import (
    COLUMNS,
    IMAGE,
    ROWS,
    Case,
    classes,
    complexes,
    image,
    image_cl,
    integers,
    line,
    low,
    positions,
    positive,
    rows,
    square,
    two,
    volume,
    with_columns,
    with_places,
    with_positions,
    within,
)

_UNARY = """
    abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc exp exp2 expm1 floor
    frac i0 lgamma log log10 log1p log2 neg reciprocal round rsqrt sigmoid sign sin sinc sinh sqrt
    square tan tanh trunc logit
""".split()
_SPECIAL = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx i0e i1 i1e log_ndtr modified_bessel_i0
    modified_bessel_k0 ndtr ndtri scaled_modified_bessel_k0 spherical_bessel_j0
""".split()
_ACTIVATIONS = """
    celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6
    selu silu softplus softshrink softsign tanhshrink
""".split()
_BINARY = """
    add atan2 copysign div fmod fmax hypot logaddexp maximum mul nextafter remainder sub xlogy
""".split()
_REDUCTIONS = """
    amax amin argmax argmin logsumexp mean median prod std sum var norm nansum all any
""".split()
_SCANS = """
    cumsum cumprod cummax cummin logcumsumexp
""".split()
_LOSSES = """
    binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss smooth_l1_loss soft_margin_loss
    poisson_nll_loss
""".split()


def elementwise() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name in _UNARY:
        fn = getattr(torch, name)
        domain = (
            positive
            if name in ("acosh", "digamma", "lgamma", "reciprocal", "rsqrt", "sqrt") or "log" in name
            else within
        )
        found[name] = Case(
            fn, within if name == "logit" else domain, name not in ("ceil", "floor", "round", "trunc", "sign")
        )
    found |= {
        f"special.{name}": Case(getattr(torch.special, name), positive)
        for name in _SPECIAL
        if name != "ndtri"
    }
    found["special.ndtri"] = Case(lambda x: torch.special.ndtri(x * 0.2), positive)
    found["special.zeta"] = Case(lambda x: torch.special.zeta(x + 1, 2.0), positive)
    found["erfinv"] = Case(torch.erfinv, within, True)
    found["polygamma"] = Case(lambda x: torch.polygamma(1, x), positive)
    found["igamma"] = Case(
        lambda x: torch.special.gammainc(x, x + 0.5), lambda: (torch.rand(128, 128) + 0.1,)
    )
    found |= {f"F.{name}": Case(getattr(F, name), rows, True) for name in _ACTIVATIONS}
    found["prelu"] = Case(F.prelu, lambda: (torch.randn(IMAGE), torch.rand(32)), True)
    found |= {name: Case(getattr(torch, name), two, name not in ("nextafter",)) for name in _BINARY}
    found["pow scalar"] = Case(lambda x: x.pow(2.5), positive, True)
    found["pow"] = Case(lambda x: x**x, positive, True)
    found["floor_divide"] = Case(lambda x, y: torch.floor_divide(x, y), two)
    found["lerp"] = Case(lambda x, y: torch.lerp(x, y, 0.3), two, True)
    found["addcmul"] = Case(lambda x, y: torch.addcmul(x, x, y), two, True)
    found["where"] = Case(lambda x, y: torch.where(x > 0, x, y), two, True)
    found["clamp"] = Case(lambda x: x.clamp(-1, 1), rows, True)
    found["nan_to_num"] = Case(torch.nan_to_num, rows, True)
    found["heaviside"] = Case(torch.heaviside, two)
    found["isclose"] = Case(torch.isclose, two)
    found["frexp"] = Case(torch.frexp, rows)
    found["ldexp"] = Case(lambda x: torch.ldexp(x, torch.tensor(3)), rows)
    found["masked_fill"] = Case(lambda x, y: x.masked_fill(y > 0, 0.5), two, True)
    found["dropout"] = Case(lambda x: F.dropout(x, 0.3), rows, True)
    found["bernoulli"] = Case(lambda x: torch.bernoulli(x.sigmoid()), rows)
    found["rand_like"] = Case(torch.rand_like, rows)
    found["randn_like"] = Case(torch.randn_like, rows)
    found["exponential"] = Case(lambda x: torch.empty_like(x).exponential_(), rows)
    found["randint_like"] = Case(lambda x: torch.randint_like(x, 0, 100), rows)
    return found


def reductions() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name in _REDUCTIONS:
        fn = getattr(torch, name)
        if name in ("argmax", "argmin", "all", "any"):
            found[f"{name} rows"] = Case(
                lambda x, fn=fn: fn(x > 1 if fn in (torch.all, torch.any) else x, dim=1), rows
            )
            found[f"{name} columns"] = Case(
                lambda x, fn=fn: fn(x > 1 if fn in (torch.all, torch.any) else x, dim=0), rows
            )
            continue
        found[f"{name} rows"] = Case(lambda x, fn=fn: fn(x, dim=1), rows, True)
        found[f"{name} columns"] = Case(lambda x, fn=fn: fn(x, dim=0), rows, True)
    found["sum all"] = Case(lambda x: x.sum(), rows, True)
    found["norm all"] = Case(lambda x: x.norm(), rows, True)
    found["max rows"] = Case(lambda x: x.max(1), rows)
    found["aminmax"] = Case(lambda x: torch.aminmax(x, dim=1), rows)
    found["count_nonzero"] = Case(lambda x: torch.count_nonzero(x > 0, dim=1), rows)
    found |= {
        f"{name} rows": Case(lambda x, n=name: getattr(torch, n)(x, 1), within, name != "cummin")
        for name in _SCANS
    }
    found |= {f"{name} columns": Case(lambda x, n=name: getattr(torch, n)(x, 0), within) for name in _SCANS}
    found["softmax rows"] = Case(lambda x: x.softmax(1), rows, True)
    found["softmax columns"] = Case(lambda x: x.softmax(0), rows, True)
    found["minus the means of columns"] = Case(lambda x: x - x.mean(0), rows, True)
    found["normalised columns"] = Case(lambda x: (x - x.mean(0)) / x.std(0), rows, True)
    found["log_softmax rows"] = Case(lambda x: x.log_softmax(1), rows, True)
    found["layer_norm"] = Case(lambda x: F.layer_norm(x, (COLUMNS,)), rows, True)
    found["rms_norm"] = Case(lambda x: F.rms_norm(x, (COLUMNS,)), rows, True)
    found["group_norm"] = Case(lambda x: F.group_norm(x, 8), image, True)
    found["group_norm cl"] = Case(lambda x: F.group_norm(x, 8), image_cl, True)
    found["instance_norm"] = Case(F.instance_norm, image, True)
    found["batch_norm"] = Case(lambda x: F.batch_norm(x, None, None, training=True), image, True)
    found["batch_norm cl"] = Case(lambda x: F.batch_norm(x, None, None, training=True), image_cl, True)
    found["local_response_norm"] = Case(lambda x: F.local_response_norm(x, 5), image, True)
    found["normalize"] = Case(lambda x: F.normalize(x, dim=1), rows, True)
    found["cosine_similarity"] = Case(lambda x, y: F.cosine_similarity(x, y, dim=1), two, True)
    found["pairwise_distance"] = Case(F.pairwise_distance, two, True)
    found["renorm"] = Case(lambda x: torch.renorm(x, 2, 0, 5.0), rows, True)
    found |= {
        f"F.{name}": Case(lambda x, y, name=name: getattr(F, name)(x, y.detach()), two, True)
        for name in _LOSSES
    }
    found["cross_entropy"] = Case(F.cross_entropy, classes, True)
    found["cross_entropy smoothing"] = Case(
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), classes, True
    )
    found["nll_loss"] = Case(lambda x, y: F.nll_loss(x, y), classes, True)
    found["multi_margin_loss"] = Case(F.multi_margin_loss, lambda: classes(100), True)
    found["triplet_margin_loss"] = Case(lambda x, y: F.triplet_margin_loss(x, y, x.flip(0)), two, True)
    found["ctc_loss"] = Case(
        lambda x, y: F.ctc_loss(x.log_softmax(2), y, torch.full((8,), 100), torch.full((8,), 20)),
        lambda: (torch.randn(100, 8, 40), torch.randint(1, 40, (8, 20))),
        True,
    )
    return found


def indexing() -> dict[str, Case]:
    zeros = (ROWS, COLUMNS)
    return {
        "index_select 0": Case(lambda x, i: x.index_select(0, i), with_positions, True),
        "index_select 1": Case(lambda x, i: x.index_select(1, i), with_positions, True),
        "x[i]": Case(lambda x, i: x[i], with_positions, True),
        "x[:, i]": Case(lambda x, i: x[:, i], with_positions, True),
        "x[i, j]": Case(lambda x, i: x[i, i.flip(0)], with_positions, True),
        "gather 0": Case(lambda x, i: x.gather(0, i), with_places, True),
        "gather 1": Case(lambda x, i: x.gather(1, i), with_columns, True),
        "take": Case(lambda x, i: x.take(i), with_places, True),
        "take_along_dim": Case(lambda x, i: x.take_along_dim(i, 1), with_columns, True),
        "scatter 1": Case(lambda x, i: torch.zeros(zeros).scatter(1, i, x), with_columns),
        "scatter_add 0": Case(lambda x, i: torch.zeros(zeros).scatter_add(0, i, x), with_places, True),
        "scatter_add 1": Case(lambda x, i: torch.zeros(zeros).scatter_add(1, i, x), with_columns, True),
        "scatter_reduce amax": Case(
            lambda x, i: torch.zeros(zeros).scatter_reduce(1, i, x, "amax"), with_columns, True
        ),
        "scatter_reduce mean": Case(
            lambda x, i: torch.zeros(zeros).scatter_reduce(1, i, x, "mean"), with_columns
        ),
        "index_add 0": Case(lambda x, i: torch.zeros(zeros).index_add(0, i, x), with_positions, True),
        "index_add 1": Case(
            lambda x, i: torch.zeros(ROWS, ROWS).index_add(1, i, x[:, :ROWS]), with_positions
        ),
        "index_copy": Case(lambda x, i: torch.zeros(zeros).index_copy(0, i, x), with_positions),
        "index_fill": Case(lambda x, i: x.index_fill(0, i, 1.0), with_positions),
        "index_put": Case(lambda x, i: torch.zeros(zeros).index_put((i,), x), with_positions),
        "index_put accumulate": Case(
            lambda x, i: torch.zeros(zeros).index_put((i,), x, True), with_positions
        ),
        "index_reduce mean": Case(
            lambda x, i: torch.zeros(64, COLUMNS).index_reduce(0, i % 64, x, "mean"), with_positions
        ),
        "masked_scatter": Case(lambda x, y: x.masked_scatter(x > 0, y), two),
        "masked_select": Case(lambda x, y: x.masked_select(y > 0), two),
        "nonzero": Case(lambda x: (x > 1).nonzero(), rows),
        "select_scatter": Case(lambda x: x.select_scatter(torch.ones(COLUMNS), 0, 3), rows, True),
        "slice_scatter": Case(lambda x, y: x.slice_scatter(y[:100], 0, 50, 150), two, True),
        "diagonal_scatter": Case(lambda x: x.diagonal_scatter(torch.ones(ROWS)), rows, True),
        "embedding": Case(
            lambda i, w: F.embedding(i, w), lambda: (positions(5000, 16, 128), torch.randn(5000, 512)), True
        ),
        "embedding_bag": Case(
            lambda i, w: F.embedding_bag(i, w),
            lambda: (positions(5000, 64, 32), torch.randn(5000, 128)),
            True,
        ),
    }


def searches() -> dict[str, Case]:
    return {
        "one_hot": Case(lambda i: F.one_hot(i, 1000), lambda: (positions(1000),)),
        "searchsorted": Case(
            lambda x, y: torch.searchsorted(x, y), lambda: (torch.randn(ROWS, COLUMNS).sort(1)[0], *rows())
        ),
        "searchsorted one": Case(
            lambda x, y: torch.searchsorted(x, y), lambda: (torch.randn(COLUMNS).sort()[0], *rows())
        ),
        "bucketize": Case(lambda x, y: torch.bucketize(x, y), lambda: (*rows(), torch.linspace(-3, 3, 100))),
        "histc": Case(lambda x: torch.histc(x, 100), rows),
        "bincount": Case(lambda i: torch.bincount(i, minlength=1000), lambda: (positions(1000, 100000),)),
        "isin": Case(
            lambda i: torch.isin(i, torch.arange(0, 100, 7)), lambda: (positions(1000, ROWS, COLUMNS),)
        ),
        "sort rows": Case(lambda x: x.sort(1), rows),
        "sort columns": Case(lambda x: x.sort(0), rows),
        "argsort": Case(lambda x: x.argsort(1), rows),
        "topk": Case(lambda x: x.topk(10, 1), rows),
        "kthvalue": Case(lambda x: x.kthvalue(10, 1), rows),
        "quantile": Case(lambda x: x.quantile(0.3, 1), rows),
        "mode": Case(lambda i: i.mode(1), lambda: (positions(20, 64, 256),)),
        "unique": Case(lambda i: torch.unique(i), lambda: (positions(1000, 50000),)),
        "multinomial": Case(lambda x: torch.multinomial(x.softmax(1), 4), rows),
        "tril": Case(lambda x: x.tril(), rows, True),
        "tril_indices": Case(lambda x: x[torch.tril_indices(500, 500).unbind()], rows),
    }


def shapes() -> dict[str, Case]:
    return {
        "cat 0": Case(lambda x, y: torch.cat([x, y], 0), two, True),
        "cat 1": Case(lambda x, y: torch.cat([x, y], 1), two, True),
        "stack last": Case(lambda x, y: torch.stack([x, y], -1), two, True),
        "t contiguous": Case(lambda x: x.t().contiguous(), rows, True),
        "permute image": Case(lambda x: x.permute(0, 2, 3, 1).contiguous(), image, True),
        "permute image back": Case(lambda x: x.permute(0, 3, 1, 2).contiguous(), image, True),
        "flip 0": Case(lambda x: x.flip(0), rows, True),
        "flip 1": Case(lambda x: x.flip(1), rows, True),
        "rot90": Case(lambda x: x.rot90(), rows, True),
        "roll 0": Case(lambda x: x.roll(3, 0), rows, True),
        "roll 1": Case(lambda x: x.roll(3, 1), rows, True),
        "roll 2-d": Case(lambda x: x.roll((3, 3), (2, 3)), image, True),
        "repeat": Case(lambda x: x[:128].repeat(2, 2), rows, True),
        "repeat_interleave": Case(lambda x: x[:128].repeat_interleave(4, 0), rows, True),
        "repeat_interleave last": Case(lambda x: x[:, :256].repeat_interleave(4, 1), rows, True),
        "expand": Case(lambda x: x[:1].expand(ROWS, COLUMNS).contiguous(), rows, True),
        "diag": Case(lambda x: torch.diag(x[0]), rows, True),
        "diagonal": Case(lambda x: x.diagonal() * 2, rows, True),
        "diag_embed": Case(lambda x: torch.diag_embed(x[:, :64]), rows, True),
        "block_diag": Case(lambda x: torch.block_diag(x[:64, :64], x[:64, :64]), rows, True),
        "pixel_shuffle": Case(lambda x: F.pixel_shuffle(x, 2), image, True),
        "pixel_unshuffle": Case(lambda x: F.pixel_unshuffle(x, 2), image, True),
        "channel_shuffle": Case(lambda x: F.channel_shuffle(x, 4), image),
        "unfold": Case(lambda x: F.unfold(x, 3, padding=1), image, True),
        "fold": Case(lambda x: F.fold(x, (56, 56), 3, padding=1), lambda: (torch.randn(4, 72, 3136),), True),
        "Tensor.unfold": Case(lambda x: x.unfold(1, 8, 4) * 2, rows, True),
        "as_strided": Case(lambda x: x.as_strided((500, 500), (1024, 2)) + 1, rows, True),
        "meshgrid": Case(lambda x: torch.stack(torch.meshgrid(x[0], x[1], indexing="ij")), rows),
        "chunk swap": Case(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), rows, True),
        "rotate half": Case(lambda x: torch.cat([-x[:, 512:], x[:, :512]], 1), rows, True),
        "pad": Case(lambda x: F.pad(x, (1, 2, 3, 4)), rows, True),
        "pad reflect": Case(lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"), image, True),
        "pad reflect cl": Case(lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"), image_cl, True),
        "pad replicate": Case(lambda x: F.pad(x, (2, 2, 2, 2), mode="replicate"), image, True),
        "pad circular": Case(lambda x: F.pad(x, (2, 2, 2, 2), mode="circular"), image, True),
        "tensor_split": Case(lambda x: [p * 2 for p in x.tensor_split(3, 1)], rows),
        "movedim": Case(lambda x: x.movedim(1, 3).contiguous(), image, True),
        "arange": Case(lambda x: torch.arange(ROWS * COLUMNS, dtype=torch.float32) + x.flatten(), rows),
        "eye": Case(lambda x: x + torch.eye(ROWS, COLUMNS), rows),
        "cdist": Case(lambda x, y: torch.cdist(x[:, :64], y[:, :64]), two, True),
        "outer": Case(lambda x: torch.outer(x[0], x[1]), rows, True),
        "kron": Case(lambda x: torch.kron(x[:32, :32], x[:16, :16]), rows, True),
        "cross": Case(lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]), two, True),
        "trace": Case(lambda x: x[:, :ROWS].trace(), rows, True),
        "vander": Case(lambda x: torch.vander(x[0], 16), rows),
        "diff": Case(lambda x: x.diff(dim=1), rows, True),
        "trapezoid": Case(lambda x: torch.trapezoid(x, dim=1), rows, True),
        "cov": Case(lambda x: torch.cov(x[:64]), rows, True),
    }


def images() -> dict[str, Case]:
    grid = torch.rand(4, 56, 56, 2) * 2 - 1
    rois = torch.eye(2, 3).expand(4, 2, 3).contiguous()
    operators: dict[str, Callable[..., Any]] = {
        "bilinear x2": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "bilinear x1.7": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        "bilinear x0.5 antialias": lambda x: F.interpolate(
            x, scale_factor=0.5, mode="bilinear", antialias=True
        ),
        "bicubic x2": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        "nearest x2": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        "nearest-exact x1.5": lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
        "area x0.5": lambda x: F.interpolate(x, scale_factor=0.5, mode="area"),
        "grid_sample": lambda x: F.grid_sample(x, grid, align_corners=False),
        "grid_sample border": lambda x: F.grid_sample(x, grid, padding_mode="border", align_corners=True),
        "grid_sample nearest": lambda x: F.grid_sample(x, grid, mode="nearest", align_corners=False),
        "grid_sample bicubic": lambda x: F.grid_sample(x, grid, mode="bicubic", align_corners=False),
        "affine": lambda x: F.grid_sample(
            x, F.affine_grid(rois, [*x.shape], align_corners=False), align_corners=False
        ),
        "max_pool 3x3 by 2": lambda x: F.max_pool2d(x, 3, 2, 1),
        "max_pool 2x2": lambda x: F.max_pool2d(x, 2),
        "max_pool 3x3 by 1": lambda x: F.max_pool2d(x, 3, 1, 1),
        "avg_pool 3x3 by 2": lambda x: F.avg_pool2d(x, 3, 2, 1),
        "avg_pool 2x2": lambda x: F.avg_pool2d(x, 2),
        "avg_pool 3x3 by 1": lambda x: F.avg_pool2d(x, 3, 1, 1),
        "adaptive_avg_pool 1": lambda x: F.adaptive_avg_pool2d(x, 1),
        "adaptive_avg_pool 7": lambda x: F.adaptive_avg_pool2d(x, 7),
        "adaptive_avg_pool 5": lambda x: F.adaptive_avg_pool2d(x, 5),
        "adaptive_max_pool 7": lambda x: F.adaptive_max_pool2d(x, 7),
        "lp_pool": lambda x: F.lp_pool2d(x, 2, 2),
        "gaussian blur": lambda x: F.conv2d(x, torch.full((32, 1, 5, 5), 0.04), padding=2, groups=32),
    }
    found = {name: Case(fn, image, True) for name, fn in operators.items()}
    found |= {f"{name} cl": Case(fn, image_cl, True) for name, fn in operators.items()}
    found["max_unpool"] = Case(
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), image, True
    )
    found["interpolate 1-d"] = Case(lambda x: F.interpolate(x, scale_factor=2, mode="linear"), line, True)
    found["interpolate 3-d"] = Case(
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), volume, True
    )
    found["nearest 3-d"] = Case(lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), volume, True)
    found["max_pool1d"] = Case(lambda x: F.max_pool1d(x, 3, 2, 1), line, True)
    found["avg_pool1d"] = Case(lambda x: F.avg_pool1d(x, 3, 2, 1), line, True)
    found["max_pool3d"] = Case(lambda x: F.max_pool3d(x, 3, 2, 1), volume, True)
    found["avg_pool3d"] = Case(lambda x: F.avg_pool3d(x, 2), volume, True)
    return found


def integers_of_all_widths() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        name = str(dtype).removeprefix("torch.")
        made = lambda d=dtype: integers(d, 0 if d is torch.uint8 else -1000, 200)  # noqa: E731
        for op in (
            "add",
            "mul",
            "bitwise_and",
            "bitwise_xor",
            "maximum",
            "eq",
            "floor_divide",
            "remainder",
            "gcd",
        ):
            found[f"{op} {name}"] = Case(getattr(torch, op), made)
        found[f"shift {name}"] = Case(lambda x, y: (x << 2) >> y.clamp(max=3), made)
        found[f"sum rows {name}"] = Case(lambda x, _: x.sum(1), made)
        found[f"sum columns {name}"] = Case(lambda x, _: x.sum(0), made)
        found[f"amax rows {name}"] = Case(lambda x, _: x.amax(1), made)
        found[f"argmax rows {name}"] = Case(lambda x, _: x.argmax(1), made)
        found[f"cumsum rows {name}"] = Case(lambda x, _: x.cumsum(1), made)
        found[f"to float {name}"] = Case(lambda x, _: x.float(), made)
        found[f"div {name}"] = Case(lambda x, y: x / y, made)
        found[f"abs {name}"] = Case(lambda x, _: x.abs(), made)
    return found


def other_floats() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        made = lambda d=dtype: low(d)  # noqa: E731
        for op in ("add", "mul", "div", "maximum"):
            found[f"{op} {name}"] = Case(getattr(torch, op), made, True)
        for op in ("exp", "tanh", "sigmoid", "sin", "log1p", "erf", "rsqrt"):
            found[f"{op} {name}"] = Case(lambda x, _, op=op: getattr(torch, op)(x), made, True)
        found[f"gelu {name}"] = Case(lambda x, _: F.gelu(x), made, True)
        found[f"silu {name}"] = Case(lambda x, _: F.silu(x), made, True)
        found[f"softmax {name}"] = Case(lambda x, _: x.softmax(1), made, True)
        found[f"layer_norm {name}"] = Case(lambda x, _: F.layer_norm(x, (COLUMNS,)), made, True)
        found[f"sum rows {name}"] = Case(lambda x, _: x.sum(1), made, True)
        found[f"sum columns {name}"] = Case(lambda x, _: x.sum(0), made, True)
        found[f"argmax {name}"] = Case(lambda x, _: x.argmax(1), made)
        found[f"cumsum {name}"] = Case(lambda x, _: x.cumsum(1), made, True)
        found[f"cat {name}"] = Case(lambda x, y: torch.cat([x, y], 1), made, True)
        found[f"t contiguous {name}"] = Case(lambda x, _: x.t().contiguous(), made)
        found[f"to float32 {name}"] = Case(lambda x, _: x.float(), made)
        found[f"from float32 {name}"] = Case(lambda x, d=dtype: x.to(d), rows)
        found[f"max_pool {name}"] = Case(
            lambda x: F.max_pool2d(x, 3, 2, 1), lambda d=dtype: (torch.randn(IMAGE).to(d),), True
        )
        found[f"avg_pool {name}"] = Case(
            lambda x: F.avg_pool2d(x, 3, 2, 1), lambda d=dtype: (torch.randn(IMAGE).to(d),), True
        )
        found[f"bilinear {name}"] = Case(
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
            lambda d=dtype: (torch.randn(IMAGE).to(d),),
            True,
        )
    return found


def rotated(x: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """A rotary embedding as a product of complex numbers."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * f[:, None]).flatten(-2)


def rotated_pairs(x: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """The same of real numbers that lie in turn."""
    cos, sin = (part.repeat_interleave(2, -1)[:, None] for part in (f.real, f.imag))
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def heads() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 512, 16, 64), torch.randn(512, 32, dtype=torch.complex64)


def complex_and_bool() -> dict[str, Case]:
    found = {fn.__name__: Case(fn, heads, True) for fn in (rotated, rotated_pairs)}
    for op in ("add", "mul", "div", "eq"):
        found[f"{op} complex64"] = Case(getattr(torch, op), complexes)
    for op in ("abs", "angle", "exp", "sqrt", "reciprocal", "conj_physical"):
        found[f"{op} complex64"] = Case(lambda x, _, op=op: getattr(torch, op)(x), complexes)
    found["polar"] = Case(lambda x, y: torch.polar(x.abs(), y), two)
    found["view_as_real"] = Case(lambda x, _: torch.view_as_real(x) * 2, complexes)
    found["sum rows complex64"] = Case(lambda x, _: x.sum(1), complexes)
    found["and bool"] = Case(lambda x, y: (x > 0) & (y > 0), two)
    found["not bool"] = Case(lambda x: ~(x > 0), rows)
    found["bool sum"] = Case(lambda x: (x > 0).sum(1), rows)
    found["bool to float"] = Case(lambda x, y: (x > 0).float() * y, two)
    return found


def contractions() -> dict[str, Case]:
    return {
        "mm": Case(lambda x, y: x @ y.t(), two, True),
        "mv": Case(lambda x, y: x @ y[0], two, True),
        "linear to 1": Case(F.linear, lambda: (torch.randn(4096, 1024), torch.randn(1, 1024)), True),
        "linear to 2": Case(F.linear, lambda: (torch.randn(4096, 1024), torch.randn(2, 1024)), True),
        "mm of depth 1": Case(lambda x, y: x[:, :1] @ y[:1], two, True),
        "bmm of vectors": Case(
            lambda x, y: x @ y, lambda: (torch.randn(1024, 64, 3), torch.randn(1024, 3, 1)), True
        ),
        "bmm": Case(lambda x: x @ x.mT, lambda: (torch.randn(32, 128, 64),), True),
        "baddbmm": Case(lambda x: torch.baddbmm(x, x, x), lambda: (torch.randn(32, 96, 96),), True),
        "einsum": Case(lambda x: torch.einsum("bij,bkj->ik", x, x), lambda: (torch.randn(32, 96, 96),), True),
        "linear": Case(
            lambda x, w: F.linear(x, w), lambda: (torch.randn(256, 768), torch.randn(768, 768)), True
        ),
        "bilinear form": Case(
            lambda x, w: F.bilinear(x, x, w), lambda: (torch.randn(64, 48), torch.randn(32, 48, 48)), True
        ),
        "conv1d": Case(
            lambda x, w: F.conv1d(x, w, padding=1), lambda: (*line(), torch.randn(64, 64, 3)), True
        ),
        "conv2d": Case(
            lambda x, w: F.conv2d(x, w, padding=1), lambda: (*image(), torch.randn(32, 32, 3, 3)), True
        ),
        "conv2d by 2": Case(
            lambda x, w: F.conv2d(x, w, None, 2, 1), lambda: (*image(), torch.randn(32, 32, 3, 3)), True
        ),
        "conv2d grouped": Case(
            lambda x, w: F.conv2d(x, w, padding=1, groups=4),
            lambda: (*image(), torch.randn(32, 8, 3, 3)),
            True,
        ),
        "conv2d dilated": Case(
            lambda x, w: F.conv2d(x, w, padding=2, dilation=2),
            lambda: (*image(), torch.randn(32, 32, 3, 3)),
            True,
        ),
        "conv_transpose2d": Case(
            lambda x, w: F.conv_transpose2d(x, w, stride=2),
            lambda: (*image(), torch.randn(32, 16, 2, 2)),
            True,
        ),
        "conv3d": Case(
            lambda x, w: F.conv3d(x, w, padding=1), lambda: (*volume(), torch.randn(16, 16, 3, 3, 3)), True
        ),
        "sdpa": Case(
            lambda x: F.scaled_dot_product_attention(x, x, x), lambda: (torch.randn(2, 8, 256, 64),), True
        ),
        "sdpa causal": Case(
            lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
            lambda: (torch.randn(2, 8, 256, 64),),
            True,
        ),
    }


def linear_algebra_and_transforms() -> dict[str, Case]:
    return {
        "inv": Case(torch.linalg.inv, square, True),
        "cholesky": Case(torch.linalg.cholesky, square, True),
        "qr": Case(lambda x: torch.linalg.qr(x), square),
        "svdvals": Case(torch.linalg.svdvals, square),
        "eigh": Case(lambda x: torch.linalg.eigh(x), square),
        "det": Case(torch.linalg.det, square, True),
        "solve": Case(lambda x: torch.linalg.solve(x, x), square, True),
        "triangular_solve": Case(
            lambda x: torch.linalg.solve_triangular(x.tril(), x, upper=False), square, True
        ),
        "matrix_exp": Case(torch.matrix_exp, lambda: square(32)),
        "matrix_power": Case(lambda x: torch.linalg.matrix_power(x, 3), square, True),
        "pinv": Case(torch.linalg.pinv, lambda: square(48)),
        "rfft": Case(lambda x: torch.fft.rfft(x), rows),
        "irfft": Case(lambda x: torch.fft.irfft(torch.fft.rfft(x)), rows, True),
        "fft2": Case(lambda x: torch.fft.fft2(x).abs(), image),
        "stft": Case(
            lambda x: torch.stft(x[:8].flatten(0), 256, window=torch.ones(256), return_complex=True).abs(),
            rows,
        ),
        "gru cell": Case(torch.nn.GRUCell(256, 256), lambda: (torch.randn(64, 256), torch.randn(64, 256))),
    }


def all_cases() -> dict[str, dict[str, Case]]:
    """By group, then by name."""
    groups = (
        elementwise,
        reductions,
        indexing,
        searches,
        shapes,
        images,
        integers_of_all_widths,
        other_floats,
        complex_and_bool,
        contractions,
        linear_algebra_and_transforms,
    )
    return {group.__name__: group() for group in groups}
