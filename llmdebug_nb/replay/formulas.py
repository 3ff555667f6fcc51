"""Formulas of operators whose own kernels know no float64, or trust their arguments too far."""

from __future__ import annotations

from collections.abc import Callable

import torch


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply groups: of rows [n, k] by [groups, k, m], of columns, or of the summed axis.

    ``offs``: where each group ends, along the axis that is not the same for all groups.
    """
    if offs is None:
        made = torch.bmm(mat_a, mat_b)
    else:
        ends = [0] * len(offs) if offs.is_meta else offs.tolist()  # on meta, shapes alone count
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        if mat_a.dim() == 2 and mat_b.dim() == 3:
            made = mat_a.new_zeros(mat_a.shape[0], mat_b.shape[2])
            for (start, end), each in zip(spans, mat_b, strict=True):
                made[start:end] = mat_a[start:end] @ each
        elif mat_a.dim() == 3 and mat_b.dim() == 2:
            made = mat_a.new_zeros(mat_a.shape[1], mat_b.shape[1])
            for (start, end), each in zip(spans, mat_a, strict=True):
                made[:, start:end] = each @ mat_b[:, start:end]
        else:
            parts = [mat_a[:, start:end] @ mat_b[start:end] for start, end in spans]
            made = torch.stack(parts)
    return made if bias is None else made + bias


def attention_gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value [batch, heads, tokens, size]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # heads of query that share one of key and value
    heads = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(heads, 1) for each in (key, value))
    scores = query @ keys.transpose(-2, -1) * scale
    if attn_mask is not None:
        scores = scores + attn_mask
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)  # a row that is masked out has none
    of_weights = grad_out @ values.transpose(-2, -1)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    shared = (key.shape[0], key.shape[1], heads, *key.shape[2:])
    of_key = (of_scores.transpose(-2, -1) @ query).view(shared).sum(2)
    of_value = (weights.transpose(-2, -1) @ grad_out).view(*shared[:-1], value.shape[-1]).sum(2)
    return of_scores @ keys, of_key, of_value


# instead of the kernel, always
SAFE: dict[str, Callable[..., object]] = {
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_gradients,
}
# instead of the kernel, in float64
WIDE: dict[str, Callable[..., object]] = {"_grouped_mm": grouped_mm}
