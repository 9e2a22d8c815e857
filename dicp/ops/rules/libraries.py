"""Rows of ops without a rule: a vendor's library serves them, or eager does. Of these, only
decompositions.OPENED are decomposed, for a vendor that does not keep them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dicp.ops.table import Kind, Row

NAMES: dict[Kind, str] = {
    "contraction": """mm addmm bmm baddbmm convolution convolution_backward _int_mm _grouped_mm
        _addmm_activation
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _cdist_forward _cdist_backward _trilinear""",
    # Random numbers come from torch's generator, so that seeds mean what they mean under eager.
    "random": """native_dropout bernoulli rand rand_like randn randn_like randint randint_like randperm
        uniform normal normal_functional multinomial exponential geometric cauchy log_normal poisson
        binomial _sample_dirichlet _standard_gamma rrelu_with_noise rrelu_with_noise_functional""",
    "library": """sort topk kthvalue median nanmedian mode nonzero nonzero_static masked_select
        unique_dim _unique2 unique_consecutive histc bincount _embedding_bag _embedding_bag_forward_only
        _embedding_bag_backward _fft_c2c _fft_r2c _fft_c2r linalg_cholesky_ex linalg_eig linalg_eigh
        _linalg_eigh linalg_inv_ex linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_qr _linalg_svd
        _linalg_det _linalg_slogdet _linalg_solve_ex linalg_solve_triangular linalg_lstsq
        linalg_ldl_factor_ex linalg_ldl_solve linalg_householder_product linalg_matrix_exp
        triangular_solve cholesky_solve cholesky_inverse ormqr geqrf _ctc_loss _ctc_loss_backward
        mkldnn_rnn_layer mkldnn_rnn_layer_backward repeat_interleave""",
}


def rows() -> Iterator[Row]:
    for kind, names in NAMES.items():
        for name in names.split():
            packet = getattr(torch.ops.aten, name, None)
            if packet is not None:              # a name of a later torch
                overloads = [o for o in packet.overloads() if not _writes(getattr(packet, o))]
                yield Row(name, tuple(getattr(packet, o) for o in overloads), kind)


def _writes(op: torch._ops.OpOverload) -> bool:
    """Whether an overload stores into an argument (`out=` and in-place forms)."""
    return op._schema.is_mutable
