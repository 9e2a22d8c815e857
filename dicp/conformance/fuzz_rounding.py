"""The noise in the fuzzer's references: what statements and their gradients make is moved by as much as
rounding may move it; so are, where that is asked for, the steps inside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .tolerance import is_inexact

ROUND = frozenset(
    """add sub rsub mul div exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal pow tanh sigmoid sin cos
    sinh cosh atan atan2 erf erfc hypot logaddexp addcmul addcdiv lerp""".split()
)
"""Operators whose every result is rounded."""

SUM = frozenset(
    """sum nansum mean var var_mean std std_mean prod cumsum cumprod logsumexp logcumsumexp mm bmm addmm
    baddbmm mv addmv dot vdot convolution convolution_backward linalg_vector_norm scatter_add index_add
    index_put embedding_dense_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d
    upsample_bicubic2d_backward _fft_c2c _fft_r2c _fft_c2r""".split()
)
"""Operators that add many terms, each of which is rounded before it is added: what cancels leaves that."""


class Rounding(TorchDispatchMode):
    """Within `inside`, the operators of ROUND and SUM round, in a direction that `move` draws, and what torch
    can decompose is decomposed down to them.

    move: (a tensor, eps) -> the tensor, each element moved by its size times eps.
    """

    def __init__(self, move: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
        super().__init__()
        self.move, self.eps = move, 0.0

    @contextmanager
    def inside(self, eps: float) -> Iterator[None]:
        """Of what runs in it every step rounds to eps."""
        self.eps = eps
        try:
            with sdpa_kernel(SDPBackend.MATH):  # attention's other kernels are one step
                yield
        finally:
            self.eps = 0.0

    def to(self, eps: float) -> None:
        """From here to the end of `inside`, to eps."""
        self.eps = eps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.eps or func._schema.is_mutable:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name not in ROUND and name not in SUM and func in decomposition_table:
            with self:
                parts = decomposition_table[func](*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if name in SUM:
            args = tree_map(self._rounded, args)
        result = func(*args, **kwargs)
        return tree_map(self._rounded, result) if name in ROUND or name in SUM else result

    def _rounded(self, x: Any) -> Any:
        return self.move(x, self.eps) if isinstance(x, torch.Tensor) and is_inexact(x.dtype) else x


class Noise:
    """What the noisy text of a program calls (`Program.source`).

    seed: 0 for none; kinds: the dtypes that the program computes its variables in, where the reference has
    fp64; deep: in the steps inside statements too.
    """

    def __init__(self, seed: int, kinds: Mapping[str, torch.dtype], deep: bool) -> None:
        self.seed, self.kinds, self.deep = seed, kinds, deep and seed > 0
        self.generator = torch.Generator().manual_seed(seed)
        self.rounding = Rounding(self.moved)

    def names(self) -> dict[str, Callable[..., Any]]:
        """The functions by the names they are called by."""
        return {"push": self.push, "pull": self.pull, "jitter": self.jitter, "inside": self.inside}

    def steps(self) -> AbstractContextManager[object]:
        """What the program runs in."""
        return self.rounding if self.deep else nullcontext()

    def inside(self, name: str = "") -> AbstractContextManager[None]:
        """What the statement that makes `name` runs in; without a name, autograd, which begins with the
        least noise that there is."""
        if not self.deep:
            return nullcontext()
        return self.rounding.inside(self.within(name) if name else min(map(self.within, self.kinds)))

    def within(self, name: str) -> float:
        """The eps of steps inside the statement that makes `name`: of its dtype, or of fp32, in which kernels
        for lower precision compute."""
        eps = torch.finfo(torch.float32).eps
        return min(eps, self.eps(name)) if is_inexact(self.kinds[name]) else eps

    def eps(self, name: str) -> float:
        """Of the dtype that the program computes a variable in."""
        return torch.finfo(self.kinds[name]).eps

    def moved(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        """A tensor with noise; the parts of a complex number by the size of both."""
        signs = self.signs(x) + self.signs(x) * 1j if x.is_complex() else self.signs(x)
        return x * (1 + eps * signs)

    def signs(self, x: torch.Tensor) -> torch.Tensor:
        """Ones and minus ones, the same for equal numbers: rounding is a function of what is rounded, and
        rows that are alike err alike."""
        parts = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()[..., None]
        bits = parts.contiguous().resolve_neg().double().view(torch.int64)
        odd = torch.randint(1 << 62, (bits.shape[-1],), generator=self.generator) * 2 + 1
        mixed = ((bits ^ bits >> 32) * odd).sum(-1)
        return ((mixed ^ mixed >> 31) * -0x61C8864680B583EB >> 62 & 1) * 2 - 1

    def pull(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """An operand: its gradient from here is moved."""
        if not self.seed or not (torch.is_grad_enabled() and x.requires_grad):
            return x
        edge = x.view_as(x)
        edge.register_hook(lambda grad: self.moved(grad, self.eps(name)))
        return edge

    def push(self, x: torch.Tensor, name: str, *operands: torch.Tensor) -> torch.Tensor:
        """A result, moved."""
        if not self.seed or not is_inexact(x.dtype):
            return x
        eps = self.eps(name)
        if eps == torch.finfo(torch.float64).eps and x.numel():
            eps *= max(1.0, max((o.numel() for o in operands), default=0) / x.numel()) ** 0.5
        if self.deep and x.requires_grad:
            # autograd comes to the nodes of a statement after it has come to its result
            x.register_hook(lambda _: self.rounding.to(self.within(name)))
        return self.moved(x, eps)

    def jitter(self, x: torch.Tensor, name: str) -> None:
        """What was written to, moved."""
        if self.seed and is_inexact(x.dtype):
            # what autograd has saved of it, the result of tanh_ say, is what was rounded
            x.data.copy_(self.moved(x.detach(), self.eps(name)))
