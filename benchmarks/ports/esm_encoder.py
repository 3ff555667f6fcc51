"""The ESM-2 of its authors, a model of proteins, against that of Hugging Face."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ports import packages
from ports.entry import Logits
from ports.made import ported
from ports.weights import Model, State, hugging_face, norms_of, renamed

WIDTH, HEADS, LAYERS = 64, 4, 3
BLOCK, LAYER = "layers.*", "esm.encoder.layer.*"
MASK, LENGTH = 32, 24
SETTINGS = {
    "vocab_size": 33, "mask_token_id": MASK, "pad_token_id": 1, "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH,
    "position_embedding_type": "rotary", "emb_layer_norm_before": False, "token_dropout": True,
    "layer_norm_eps": 1e-5, "initializer_range": 0.12, "attn_implementation": "sdpa",
}  # fmt: skip
norms = norms_of(
    "esm.encoder.layer",
    {"attention.LayerNorm": "attention.self.{query,key,value}", "LayerNorm": "intermediate.dense"},
    {"esm.encoder.emb_layer_norm_after": "lm_head.dense"},
)


def head_bias(model: Model) -> None:
    """Give the head a bias that only it has, and as large as the logits."""
    model.lm_head.bias.normal_(0, 0.3)


original = hugging_face("EsmForMaskedLM", SETTINGS, change=head_bias)


def protein(ids: torch.Tensor) -> torch.Tensor:
    """Return the ids with a start, an end, and a few masked places."""
    ids = ids.clone().clamp(max=23)  # amino acids
    ids[:, 0], ids[:, -1] = 0, 2
    ids[:, 3::7] = MASK
    return ids


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(protein(ids)).logits]


def work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(protein(ids))["logits"]]


def source() -> Path:
    packages.file(
        "esm", "", axial_attention={"ColumnSelfAttention": None, "RowSelfAttention": None}
    )
    importlib.import_module("esm.data")  # the model names it in full
    return packages.joined(
        "esm", "rotary_embedding.py", "multihead_attention.py", "modules.py", "model/esm2.py"
    )


def make(code: ModuleType, hf: Model, **settings: Any) -> Model:
    given = {"num_layers": LAYERS, "embed_dim": WIDTH, "attention_heads": HEADS}
    return code.ESM2(**{**given, **settings})


def prepare(model: Model, dtype: torch.dtype) -> None:
    """Compute the tables of RoPE in float32: the package's own in half precision are coarse."""
    for module in model.modules():
        if hasattr(module, "_cos_cached"):
            cos, sin = module._update_cos_sin_tables(torch.empty(1, LENGTH, WIDTH // HEADS))
            module._cos_cached, module._sin_cached = cos.to(dtype), sin.to(dtype)


NAMES = {
    "embed_tokens": "esm.embeddings.word_embeddings",
    "lm_head": "esm.embeddings.word_embeddings",
    "lm_head.bias": "lm_head.bias",
    "lm_head.{dense,layer_norm}": "lm_head.{dense,layer_norm}",
    "emb_layer_norm_after": "esm.encoder.emb_layer_norm_after",
    "layers.*.self_attn.{q,k,v}_proj": "esm.encoder.layer.*.attention.self.{query,key,value}",
    "layers.*.self_attn.out_proj": "esm.encoder.layer.*.attention.output.dense",
    "layers.*.{fc1,fc2}": "esm.encoder.layer.*.{intermediate,output}.dense",
    "layers.*.{self_attn,final}_layer_norm": "esm.encoder.layer.*.{attention.LayerNorm,LayerNorm}",
}


def convert(hf: Model) -> State:
    """Return the weights under the names of ESM's authors."""
    unused = {"weight": torch.zeros(1, LAYERS * HEADS), "bias": torch.zeros(1)}
    state = {f"contact_head.regression.{kind}": value for kind, value in unused.items()}
    return state | renamed(hf.state_dict(), NAMES)


ATTENTION = (f"{BLOCK}.self_attn", f"{LAYER}.attention.self")
BUGS = r"""
rope_layout: q and k are ordered for interleaved RoPE
    weights each(lambda w: interleaved(w, HEADS), "layers.*.self_attn.{q,k}_proj")
    in $BLOCK.self_attn.[qk]_proj $LAYER.attention.self.query $LAYER.attention.self.key
norms_swapped: the two norms of each layer are swapped
    weights swap("layers.*.self_attn_layer_norm", "layers.*.final_layer_norm")
    in $BLOCK.self_attn_layer_norm $BLOCK.final_layer_norm $LAYER.attention.LayerNorm
    in $LAYER.LayerNorm
transposed: the value projection is transposed
    weights transpose("layers.*.self_attn.v_proj.weight")
    in $BLOCK.self_attn.v_proj $LAYER.attention.self.value
layer_off: a weight is that of the layer before
    weights copy("layers.2.fc1.weight", "layers.1.fc1.weight")
    in layers.2.fc1 esm.encoder.layer.2.intermediate.dense
head_bias_left: the bias of the head is not loaded
    weights each(torch.zeros_like, "lm_head.bias")
    in lm_head lm_head.decoder
last_norm_left: the last norm is not loaded
    weights as_made("emb_layer_norm_after")
    in emb_layer_norm_after esm.encoder.emb_layer_norm_after
no_token_dropout: embeddings are not scaled by the share of masked tokens
    settings {"token_dropout": False}
    in (root) esm.embeddings
    golden esm.embeddings/Tensor.mul esm.embeddings/Tensor.masked_fill
rope_base: the base of RoPE is another one
    - inv_freq = 1.0 / (10000 **
    + inv_freq = 1.0 / (1000 **
    in $BLOCK.self_attn.rot_emb esm.rotary_embeddings
    early
no_scale: scores are scaled with the width of the model
    - self.scaling = self.head_dim**-0.5
    + self.scaling = self.embed_dim**-0.5
    in $ATTENTION
    early
rotate_sign: RoPE turns the other way
    - return torch.cat((-x2, x1), dim=-1)
    + return torch.cat((x2, -x1), dim=-1)
    in $BLOCK.self_attn.rot_emb $LAYER.attention.self
gelu: GELU is the one by sigmoid
    - return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    + return x * torch.sigmoid(1.702 * x)
    in $BLOCK $LAYER.intermediate lm_head
    golden $LAYER.intermediate/Torch.erf
post_norm: the residual is the normalised input of the feed-forward layer
    -         residual = x
    -         x = self.final_layer_norm(x)
    +         x = self.final_layer_norm(x)
    +         residual = x
    in $BLOCK $LAYER $LAYER.output
    also gelu(self.fc1(x)) ... x = residual + x
"""
PORTS = (ported(globals(), "esm2", "esm", length=LENGTH),)
