"""BERT made of PyTorch's own encoder layers against that of Hugging Face."""

from __future__ import annotations

import torch

from ports.entry import Logits
from ports.made import written
from ports.weights import Model, norms_of

WIDTH, HEADS = 64, 4
PADDING = 3  # so many last tokens
BLOCK, LAYER = "encoder.layers.*", "bert.encoder.layer.*"
SETTINGS = {
    "vocab_size": 512, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH, "max_position_embeddings": 64, "initializer_range": 0.12,
    "tie_word_embeddings": False, "attn_implementation": "sdpa",
}  # fmt: skip
OWN = f"{LAYER}.attention"
NAMES = {
    "embeddings.token": "bert.embeddings.word_embeddings",
    "embeddings.place": "bert.embeddings.position_embeddings.weight",
    "embeddings.segment": "bert.embeddings.token_type_embeddings.weight",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "transform.{0,2}": "cls.predictions.transform.{dense,LayerNorm}",
    "head": "cls.predictions.decoder",
    f"{BLOCK}.self_attn.in_proj_weight": f"{OWN}.self.{{query,key,value}}.weight",
    f"{BLOCK}.self_attn.in_proj_bias": f"{OWN}.self.{{query,key,value}}.bias",
    f"{BLOCK}.self_attn.out_proj": f"{OWN}.output.dense",
    f"{BLOCK}.norm1": f"{OWN}.output.LayerNorm",
    f"{BLOCK}.linear{{1,2}}": f"{LAYER}.{{intermediate,output}}.dense",
    f"{BLOCK}.norm2": f"{LAYER}.output.LayerNorm",
}
# the outputs of the others are residuals too
norms = norms_of(last={"cls.predictions.transform.LayerNorm": "cls.predictions.decoder"})


def inputs(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, segments, and which tokens are none for padding, each [1, length]."""
    segments, visible = torch.zeros_like(ids), torch.ones_like(ids)
    segments[:, ids.shape[1] // 2 :] = 1
    visible[:, -PADDING:] = 0
    return ids, segments, visible


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    ids, segments, visible = inputs(ids)
    out = model(ids, token_type_ids=segments, attention_mask=visible)
    return [out.logits[:, :-PADDING]]


def work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(*inputs(ids))[:, :-PADDING]]


ATTENTION = (f"{BLOCK}.self_attn", f"{OWN}.self")  # the fused weight is its own
QKV = (*ATTENTION, *(f"{OWN}.self.{name}" for name in ("query", "key", "value")))
EMBEDDINGS = ("embeddings", "bert.embeddings")
IN_PROJ = "encoder.layers.*.self_attn.in_proj_{weight,bias}"
BUGS = r"""
q_last: q is fused after k and v
    weights each(lambda w: reordered(w, (1, 2, 0)), IN_PROJ)
    in $QKV
by_head: q, k and v are fused head by head
    weights each(lambda w: turned(w, 3, HEADS), IN_PROJ)
    in $QKV
fused_bias_left: the fused bias is not loaded
    weights each(torch.zeros_like, "encoder.layers.*.self_attn.in_proj_bias")
    in $QKV
norms_swapped: the norms of each layer are swapped
    weights swap("encoder.layers.*.norm1", "encoder.layers.*.norm2")
    in $BLOCK.norm[12] $OWN.output.LayerNorm $LAYER.output.LayerNorm
layer_off: a weight is that of the layer before
    weights copy("encoder.layers.2.linear2.weight", "encoder.layers.1.linear2.weight")
    in encoder.layers.2.linear2 bert.encoder.layer.2.output.dense
head_bias_left: the bias of the head is not loaded
    weights each(torch.zeros_like, "head.bias")
    in head cls.predictions.decoder
head_tied: the head has the embedding's weight
    weights copy("head.weight", "embeddings.token.weight")
    in head cls.predictions.decoder
transposed: the linear layer of the head is transposed
    weights transpose("transform.0.weight")
    in transform.0 cls.predictions.transform.dense
segments_swapped: the embeddings of the segments are swapped
    weights each(lambda segment: segment.flip(0), "embeddings.segment")
    in $EMBEDDINGS bert.embeddings.token_type_embeddings
relu: ReLU for GELU, as is PyTorch's default
    settings {"activation": "relu"}
    in $BLOCK $LAYER.intermediate $LAYER.intermediate.intermediate_act_fn
norm_first: norms come before, not after
    settings {"first": True}
    in $BLOCK $LAYER $OWN $OWN.output $LAYER.output
places_off: positions begin at one
    - x + self.place[: ids.shape[1]]
    + x + self.place[1 : ids.shape[1] + 1]
    in $EMBEDDINGS bert.embeddings.position_embeddings
no_segments: all tokens are of the first segment
    - F.one_hot(segments, len(self.segment))
    + F.one_hot(segments * 0, len(self.segment))
    in $EMBEDDINGS bert.embeddings.token_type_embeddings
mask_turned: the tokens are masked, not the padding
    - src_key_padding_mask=visible == 0
    + src_key_padding_mask=visible == 1
    in (root) bert $ATTENTION
no_mask: the padding is not masked
    - self.encoder(x, src_key_padding_mask=visible == 0)
    + self.encoder(x)
    in (root) bert $ATTENTION
"""
PORTS = (written(globals(), "torch-bert", "Encoder", "BertForMaskedLM", file="torch_bert"),)
