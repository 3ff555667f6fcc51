"""ALBERT of curated-transformers, whose layers share weights, against that of Hugging Face."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch

from ports.bert_encoder import PADDING, inputs
from ports.curated_decoders import source as curated
from ports.entry import Logits
from ports.made import ported
from ports.weights import Model, State, hugging_face, norms_of, renamed

WIDTH, EMBEDDING, HEADS, LAYERS, GROUPS, VOCABULARY = 64, 32, 4, 6, 2, 512
BLOCK = "groups.*.group_layers.0"
GROUP, LAYER = "encoder.albert_layer_groups.*", "encoder.albert_layer_groups.*.albert_layers.0"
SETTINGS = {
    "vocab_size": VOCABULARY, "embedding_size": EMBEDDING, "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS, "num_hidden_groups": GROUPS, "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH, "max_position_embeddings": 64, "attn_implementation": "sdpa",
}  # fmt: skip
original = hugging_face("AlbertModel", SETTINGS, 0.12, add_pooling_layer=False)
# the outputs of the others are residuals too
norms = norms_of(last={"embeddings.LayerNorm": "encoder.embedding_hidden_mapping_in"})


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    ids, segments, visible = inputs(ids)
    out = model(ids, token_type_ids=segments, attention_mask=visible)
    return [out.last_hidden_state[:, :-PADDING]]


def work(model: Model, ids: torch.Tensor) -> Logits:
    ids, segments, visible = inputs(ids)
    out = model(ids, model.mask(visible == 1), type_ids=segments)
    return [out.all_outputs[-1][:, :-PADDING]]


def make(code: ModuleType, hf: Model, **settings: Any) -> Model:
    given: dict[str, Any] = {
        "activation": code.Activation("gelu_new"), "embedding_width": EMBEDDING,
        "hidden_width": WIDTH, "intermediate_width": 4 * WIDTH, "n_attention_heads": HEADS,
        "n_hidden_layers": LAYERS, "n_hidden_groups": GROUPS, "n_pieces": VOCABULARY,
        "n_positions": 64,
    }  # fmt: skip
    model = code.ALBERTEncoder(code.ALBERTConfig(**{**given, **settings}))
    model.mask = code.AttentionMask
    return model


OUTSIDE = {
    "embeddings.{piece,type}_embeddings": "embeddings.{word,token_type}_embeddings",
    "embeddings.position_embeddings": "embeddings.position_embeddings",
    "embeddings.embed_output_layer_norm": "embeddings.LayerNorm",
    "embeddings.projection": "encoder.embedding_hidden_mapping_in",
}
NAMES = {
    "mha.query": "attention.query",
    "mha.key": "attention.key",
    "mha.value": "attention.value",
    "mha.output": "attention.dense",
    "attn_residual_layer_norm": "attention.LayerNorm",
    "ffn.intermediate": "ffn",
    "ffn.output": "ffn_output",
    "ffn_residual_layer_norm": "full_layer_layer_norm",
}


def convert(hf: Model) -> State:
    """Return the weights under the names of curated-transformers."""
    inside = {f"{BLOCK}.{ours}": f"{LAYER}.{theirs}" for ours, theirs in NAMES.items()}
    return renamed(hf.state_dict(), OUTSIDE | inside)


MHA, SCORER = f"{BLOCK}.mha", f"{BLOCK}.mha.attention_scorer"
EVERYWHERE = (
    *(f"{BLOCK}.{name}" for name in NAMES),
    *(f"{LAYER}.{name}" for name in NAMES.values()),
)
NORMS = (
    f"{BLOCK}.*_residual_layer_norm",
    f"{LAYER}.attention.LayerNorm",
    f"{LAYER}.full_layer_layer_norm",
)
BUGS = r"""
groups_swapped: the groups of layers are swapped
    weights swap("groups.0", "groups.1")
    in $EVERYWHERE
keys_of_first: the keys of the second group are those of the first
    weights copy(*(f"groups.{n}.group_layers.0.mha.key.weight" for n in (1, 0)))
    in groups.1.group_layers.0.mha.key encoder.albert_layer_groups.1.albert_layers.0.attention.key
norms_swapped: the norms of each layer are swapped
    weights swap(f"{BLOCK}.attn_residual_layer_norm", f"{BLOCK}.ffn_residual_layer_norm")
    in $NORMS
projection_bias_left: the bias behind the embeddings is not loaded
    weights each(torch.zeros_like, "embeddings.projection.bias")
    in embeddings.projection encoder.embedding_hidden_mapping_in
value_bias_left: the bias of the values is not loaded
    weights each(torch.zeros_like, f"{MHA}.value.bias")
    in $MHA.value $LAYER.attention.value
wrong_eps: eps of the norms is too large
    settings {"layer_norm_eps": 0.01}
    in embeddings.embed_output_layer_norm embeddings.LayerNorm $NORMS
in_turn: the groups take turns, not one after the other
    -         for group in self.groups:
    -             for _ in range(layers_per_group):
    +         for _ in range(layers_per_group):
    +             for group in self.groups:
    in (root) encoder
    also layer_output, _ = group(layer_output, attention_mask=attention_mask)
one_layer_less: each group is run once too few
    - for _ in range(layers_per_group):
    + for _ in range(layers_per_group - 1):
    in (root) encoder
    golden $GROUP $LAYER
    also layer_output, _ = group(layer_output, attention_mask=attention_mask)
places_off: positions begin at one
    - torch.arange(x.shape[1], device=x.device).expand(1, -1)
    + torch.arange(1, x.shape[1] + 1, device=x.device).expand(1, -1)
    in embeddings embeddings.position_embeddings
    also position_embeddings = self.position_embeddings(positions)
no_segments: all tokens are of the first segment
    - embeddings += self.type_embeddings(type_ids)
    + embeddings += self.type_embeddings(type_ids * 0)
    in embeddings embeddings.type_embeddings embeddings.token_type_embeddings
no_residual: the residual is not added after attention
    - self.attn_residual_layer_norm(input + attn_out)
    + self.attn_residual_layer_norm(attn_out)
    in $BLOCK $LAYER.attention
    golden $LAYER.attention/Tensor.add
no_mask: the padding is not masked
    - return torch.where(self.bool_mask, input, blocked_value)
    + return input
    in $SCORER $MHA (root) $LAYER.attention
no_root: scores are divided by the width of a head, not by its root
    - attn_scores /= math.sqrt(width)
    + attn_scores /= width
    in $SCORER $MHA $LAYER.attention
"""
PORTS = (
    ported(
        globals(),
        "curated-albert",
        "curated_transformers",
        source=partial(curated, "albert", "config", "layer_group", "encoder"),
    ),
)
