"""The operators that are replayed: an explicit list, looked up by name in torch's own namespaces.

A dump names operators and gives their arguments. Some operators of torch read or write memory
without a check (those that take strides or pointers), open files, or change objects. So only those
below are run, which are what models compute with. Each reads and writes its own tensors alone, and
checks their sizes and indices itself. `tests/test_replay_process.py` checks the list by schemas.
Counts may still end a process (a number of heads of 0): dumps of others are replayed in another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from llmdebug_nb.core.torch_internals import (
    VF,
    decompositions,
    dispatched_operators,
    is_tensor_method,
    overridable_functions,
)
from llmdebug_nb.replay.checks import FAILS, UNKNOWN
from llmdebug_nb.replay.formulas import SAFE

Operator = Callable[..., object]


class CannotReplay(Exception):
    """A recorded call can't be replayed; the message says why.

    ``kind``: of `core.opchecks.REASONS`.
    """

    def __init__(self, message: str, kind: str = FAILS) -> None:
        super().__init__(message)
        self.kind = kind


_NAMESPACES: dict[str, tuple[str, object]] = {
    "Functional": ("torch.nn.functional", torch.nn.functional),
    "Tensor": ("torch.Tensor", torch.Tensor),
    "Torch": ("torch", torch),
    "Torch.fft": ("torch.fft", torch.fft),
    "Torch.linalg": ("torch.linalg", torch.linalg),
    "Torch.special": ("torch.special", torch.special),
    "VF": ("torch._VF", VF),
}
_ARITHMETIC = """
add sub mul div true_divide floor_divide remainder fmod pow float_power neg negative abs absolute
subtract multiply divide rsub reciprocal square sqrt rsqrt sign sgn positive pos
truediv floordiv mod radd rmul rtruediv rfloordiv rpow rmod iadd isub imul itruediv idiv ifloordiv
imod ipow addcmul addcdiv lerp hypot gcd lcm ldexp frexp copysign nextafter heaviside
floor ceil round trunc fix frac clamp clamp_min clamp_max clip nan_to_num maximum minimum fmax fmin
exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 xlogy sigmoid logit
sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sinc deg2rad rad2deg
arcsin arccos arctan arctan2 arcsinh arccosh arctanh
erf erfc erfinv lgamma digamma polygamma mvlgamma igamma igammac i0
special_erfcx special_entr special_i0e special_i1 special_i1e special_xlog1py special_ndtri
special_expit special_erf special_erfc special_erfinv special_exp2 special_expm1 special_log1p
special_sinc special_round special_logit special_digamma special_psi special_gammaln
special_multigammaln special_polygamma special_xlogy special_i0 special_ndtr special_log_ndtr
special_softmax special_log_softmax special_logsumexp special_gammainc special_gammaincc
complex polar conj conj_physical _conj_physical resolve_conj resolve_neg angle real imag
view_as_real view_as_complex
"""
_LOGIC = """
eq ne lt le gt ge equal not_equal less less_equal greater greater_equal isclose
isnan isinf isfinite isneginf isposinf isreal isin signbit where masked_fill
logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
bitwise_left_shift bitwise_right_shift and or xor invert lshift rshift rand ror rxor rlshift rrshift
iand ior ixor ilshift irshift
"""
_ACTIVATIONS = """
relu relu6 gelu silu mish elu celu selu leaky_relu prelu _prelu_kernel rrelu glu softplus softsign
softshrink hardshrink hardtanh hardsigmoid hardswish tanhshrink threshold logsigmoid
log_sigmoid_forward softmax log_softmax softmin _softmax _log_softmax _safe_softmax gumbel_softmax
dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout
native_dropout
"""
_REDUCTIONS = """
sum mean prod max min amax amin aminmax argmax argmin all any var std var_mean std_mean norm
linalg_vector_norm linalg_matrix_norm linalg_norm frobenius_norm native_norm dist renorm
logsumexp nansum nanmean median nanmedian mode kthvalue quantile nanquantile count_nonzero
cumsum cumprod cummax cummin logcumsumexp diff bincount histc trapezoid cov corrcoef
"""
_PRODUCTS = """
linear _addmm_activation addmm mm bmm matmul rmatmul baddbmm addbmm addmv mv addr ger outer inner
dot vdot einsum tensordot kron cross linalg_cross linalg_vecdot linalg_multi_dot chain_matmul
bilinear _trilinear cosine_similarity pairwise_distance cdist _cdist_forward pdist
scaled_dot_product_attention _scaled_dot_product_attention_math
_scaled_dot_product_flash_attention_for_cpu
multi_head_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd
_grouped_mm _scaled_mm _int_mm matrix_exp matrix_power det logdet slogdet inverse cholesky
linalg_inv linalg_inv_ex linalg_solve linalg_solve_triangular linalg_cholesky linalg_cholesky_ex
linalg_det linalg_slogdet linalg_matrix_exp linalg_matrix_power linalg_matmul triangular_solve
"""
_NORMALIZATION = """
layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm batch_norm
native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training instance_norm
local_response_norm normalize
"""
_INDEXING = """
getitem setitem index index_put index_select index_add index_copy index_fill index_reduce
gather scatter scatter_add scatter_reduce take take_along_dim put select select_scatter slice
slice_scatter diagonal_scatter narrow narrow_copy masked_select masked_scatter nonzero argwhere
embedding one_hot searchsorted bucketize
sort argsort topk msort unique unique_consecutive _unique2 unique_dim
"""
_SHAPES = """
view view_as _unsafe_view reshape reshape_as transpose permute expand expand_as squeeze unsqueeze t
chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind unflatten flatten ravel
detach diagonal linalg_diagonal movedim moveaxis swapaxes swapdims adjoint
broadcast_to broadcast_tensors
contiguous clone copy to _to_copy type type_as float double half bfloat16 int long short char byte
bool cfloat cdouble chalf cpu alias atleast_1d atleast_2d atleast_3d lift_fresh_copy
view_copy expand_copy permute_copy transpose_copy squeeze_copy unsqueeze_copy t_copy select_copy
slice_copy split_copy unbind_copy diagonal_copy detach_copy alias_copy
cat concat concatenate stack hstack vstack dstack column_stack row_stack block_diag
repeat tile repeat_interleave roll flip fliplr flipud rot90 tril triu diag diag_embed diagflat trace
meshgrid cartesian_prod combinations constant_pad_nd pad reflection_pad1d reflection_pad2d
replication_pad1d replication_pad2d pixel_shuffle pixel_unshuffle channel_shuffle unfold_copy
"""
_CREATION = """
zeros ones full arange linspace logspace eye scalar_tensor tensor tril_indices triu_indices
zeros_like ones_like full_like empty empty_like empty_permuted new_empty new_zeros new_ones new_full
new_tensor fill zero fill_diagonal rand randn randint randperm rand_like randn_like randint_like
bernoulli multinomial normal uniform exponential log_normal poisson random
"""
_CONVOLUTIONS = """
conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d
_adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
lp_pool1d lp_pool2d interpolate upsample_nearest1d upsample_nearest2d upsample_linear1d
upsample_bilinear2d upsample_bicubic2d unfold fold im2col col2im grid_sample grid_sampler
grid_sampler_2d affine_grid stft istft _fft_r2c _fft_c2r _fft_c2c
fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn
fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_ihfft fft_fftshift fft_ifftshift
lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""
_LOSSES = """
cross_entropy nll_loss nll_loss_forward kl_div mse_loss l1_loss smooth_l1_loss huber_loss
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss margin_ranking_loss
hinge_embedding_loss soft_margin_loss triplet_margin_loss gaussian_nll_loss poisson_nll_loss
"""
# Their kernels trust what the forward pass has checked. Those of them that torch has a formula for,
# made of operators that check for themselves, are computed by that.
_GRADIENTS = """
_fused_rms_norm_backward _log_softmax_backward_data _prelu_kernel_backward _softmax_backward_data
batch_norm_backward binary_cross_entropy_backward diagonal_backward elu_backward
embedding_dense_backward gelu_backward glu_backward hardsigmoid_backward hardswish_backward
hardtanh_backward huber_loss_backward leaky_relu_backward log_sigmoid_backward logit_backward
max_pool2d_with_indices_backward mish_backward mse_loss_backward native_batch_norm_backward
native_dropout_backward native_group_norm_backward native_layer_norm_backward nll_loss2d_backward
nll_loss_backward reflection_pad1d_backward reflection_pad2d_backward rrelu_with_noise_backward
select_backward sigmoid_backward silu_backward slice_backward smooth_l1_loss_backward
soft_margin_loss_backward softplus_backward tanh_backward threshold_backward unfold_backward
"""
# Functions of torch that it does not list as operators, most of them as they take no tensor.
_UNLISTED = frozenset(
    (
        "tensor", "zeros", "ones", "full", "arange", "linspace", "logspace", "eye",
        "scalar_tensor", "tril_indices", "triu_indices", "empty", "rand", "randn", "randint",
        "randperm", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
        "randint_like", "fill", "normal", "_grouped_mm", "_transformer_encoder_layer_fwd",
        "hardswish", "hardsigmoid",
    )
)  # fmt: skip
_OF_GRADIENTS = frozenset(_GRADIENTS.split())
# they give memory that nothing has written yet
UNSET_MEMORY = frozenset(("empty", "empty_like", "empty_permuted", "new_empty"))
# the size of their results depends on values, and is no larger than what they take
SIZED_BY_VALUES = frozenset(
    (
        "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_unique2",
        "unique_dim", "getitem", "index", "where",
    )
)  # fmt: skip
# Without the underscores of methods in place and of Python's operators. torch.linalg.norm is called
# linalg_norm, as the dispatcher has it.
REPLAYED = frozenset(
    f"""{_ARITHMETIC} {_LOGIC} {_ACTIVATIONS} {_REDUCTIONS} {_PRODUCTS} {_NORMALIZATION} {_INDEXING}
    {_SHAPES} {_CREATION} {_CONVOLUTIONS} {_LOSSES}""".split()
)


@functools.cache
def replayed(name: str) -> tuple[str, Operator]:
    """Return the qualified name and the function of an operator that may be replayed.

    ``name``: as recorded, such as ``Functional.linear`` or ``Aten.add.Tensor``.

    Raises:
        CannotReplay: torch has no such operator, or it is not on the list.
    """
    found = operator(name)
    bare = bare_name(name)
    formula = decompositions().get(found[1]) if bare in _OF_GRADIENTS else SAFE.get(bare)
    if formula is not None:
        return f"the formula of {found[0]}", formula
    if bare not in REPLAYED:
        raise CannotReplay(f"{found[0]} is not one of the operators that are replayed", UNKNOWN)
    return found


def by_formula(name: str) -> bool:
    """Tell whether an operator's formula runs instead of its kernel, in any dtype."""
    bare = bare_name(name)
    return bare in _OF_GRADIENTS or bare in SAFE


def bare_name(name: str) -> str:
    """Return the name of an operator without its namespace, overload and underscores."""
    prefix, bare = _parts(name)
    if prefix == "Aten":
        bare = bare.partition(".")[0]
    elif prefix.startswith("Torch."):
        bare = f"{prefix.removeprefix('Torch.')}_{bare}"
    return bare[2:-2] if bare.startswith("__") else bare.removesuffix("_")


@functools.cache
def operator(name: str) -> tuple[str, Operator]:
    """Return the qualified name and the function of a recorded operator, to be looked at only.

    Raises:
        CannotReplay: torch has no such operator.
    """
    prefix, bare = _parts(name)
    if prefix == "Aten":
        return _aten(bare)
    where, home = _NAMESPACES.get(prefix, ("", None))
    for each in (bare, f"__{bare}__"):  # x / y is recorded as Tensor.truediv
        function = _member(home, each) if each.isidentifier() else None
        if function is not None:
            return f"{where}.{each}", function
    raise CannotReplay(f"torch has no operator {name} that can be replayed", UNKNOWN)


def _parts(name: str) -> tuple[str, str]:
    """Return the namespace of a recorded operator and its name there, an overload with it."""
    prefix, _, rest = name.partition(".")
    if prefix == "Torch":
        inner, _, bare = rest.removeprefix("functional.").rpartition(".")  # also torch.functional's
        return (f"{prefix}.{inner}" if inner else prefix), bare
    return prefix, rest


def _member(home: object, name: str) -> Operator | None:
    """Return an operator of a namespace, None if torch does not list it as one."""
    if home is None:
        return None
    function: object = vars(home).get(name, getattr(home, name, None))
    listed = id(function) in overridable_functions() or is_tensor_method(function, name)
    listed = listed or (home in (torch, torch.nn.functional) and name in _UNLISTED)
    return function if callable(function) and listed else None


def _aten(bare: str) -> tuple[str, Operator]:
    name, _, overload = bare.partition(".")
    if name.isidentifier() and f"aten::{bare if overload else name}" in dispatched_operators():
        which = overload or "default"
        return f"torch.ops.aten.{name}.{which}", getattr(getattr(torch.ops.aten, name), which)
    raise CannotReplay(f"this version of torch has no operator Aten.{bare}", UNKNOWN)
