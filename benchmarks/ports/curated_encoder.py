"""ALBERT of curated-transformers, whose layers share weights, against that of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import transformers

from ports import packages
from ports.bert_encoder import PADDING, inputs
from ports.curated_decoders import scaled, source
from ports.entry import Bug, Logits, Model, Port, State

WIDTH, EMBEDDING, HEADS, LAYERS, GROUPS, VOCABULARY = 64, 32, 4, 6, 2, 512
BLOCK = "groups.*.group_layers.0"
GROUP, LAYER = "encoder.albert_layer_groups.*", "encoder.albert_layer_groups.*.albert_layers.0"


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=EMBEDDING,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_hidden_groups=GROUPS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    return scaled(transformers.AlbertModel(config, add_pooling_layer=False), seed)


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norm of the embeddings: the outputs of the others are residuals too."""
    yield hf.embeddings.LayerNorm, [hf.encoder.embedding_hidden_mapping_in]


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    ids, segments, visible = inputs(ids)
    out = model(ids, token_type_ids=segments, attention_mask=visible)
    return [out.last_hidden_state[:, :-PADDING]]


def work(model: Model, ids: torch.Tensor) -> Logits:
    ids, segments, visible = inputs(ids)
    out = model(ids, model.mask(visible == 1), type_ids=segments)
    return [out.all_outputs[-1][:, :-PADDING]]


# -- the port ------------------------------------------------------------------------------------


def make(code: ModuleType, hf: Model, **settings: Any) -> Model:
    given: dict[str, Any] = {
        "activation": code.Activation("gelu_new"),
        "embedding_width": EMBEDDING,
        "hidden_width": WIDTH,
        "intermediate_width": 4 * WIDTH,
        "n_attention_heads": HEADS,
        "n_hidden_layers": LAYERS,
        "n_hidden_groups": GROUPS,
        "n_pieces": VOCABULARY,
        "n_positions": 64,
    }
    model = code.ALBERTEncoder(code.ALBERTConfig(**{**given, **settings}))
    model.mask = code.AttentionMask
    return model


OUTSIDE = {
    "embeddings.piece_embeddings": "embeddings.word_embeddings",
    "embeddings.type_embeddings": "embeddings.token_type_embeddings",
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
    given, state, pairs = hf.state_dict(), {}, dict(OUTSIDE)
    for n in range(GROUPS):
        new, old = (path.replace("*", str(n)) for path in (BLOCK, LAYER))
        pairs |= {f"{new}.{ours}": f"{old}.{theirs}" for ours, theirs in NAMES.items()}
    for ours, theirs in pairs.items():
        for kind in ("weight", "bias"):
            if f"{theirs}.{kind}" in given:
                state[f"{ours}.{kind}"] = given[f"{theirs}.{kind}"]
    return state


# -- changes of weights --------------------------------------------------------------------------


def groups_swapped(state: State) -> None:
    for name in [name for name in state if name.startswith("groups.0.")]:
        other = name.replace("groups.0.", "groups.1.")
        state[name], state[other] = state[other], state[name]


def keys_of_first(state: State) -> None:
    name = "groups.{}.group_layers.0.mha.key.weight"
    state[name.format(1)] = state[name.format(0)].clone()


def norms_swapped(state: State) -> None:
    for n in range(GROUPS):
        for kind in ("weight", "bias"):
            path = f"groups.{n}.group_layers.0.{{}}_residual_layer_norm.{kind}"
            a, b = path.format("attn"), path.format("ffn")
            state[a], state[b] = state[b], state[a]


def projection_bias_left(state: State) -> None:
    state["embeddings.projection.bias"].zero_()


def value_bias_left(state: State) -> None:
    for n in range(GROUPS):
        state[f"groups.{n}.group_layers.0.mha.value.bias"].zero_()


# -- bugs ----------------------------------------------------------------------------------------

SCORER = f"{BLOCK}.mha.attention_scorer"
GROUP_BY_GROUP = """        for group in self.groups:
            for _ in range(layers_per_group):
"""
IN_TURN = """        for _ in range(layers_per_group):
            for group in self.groups:
"""
CALL = "layer_output, _ = group(layer_output, attention_mask=attention_mask)"
BUGS = (
    Bug(
        "groups_swapped",
        "the groups of layers are swapped",
        convert=groups_swapped,
        modules=(
            *(f"{BLOCK}.{name}" for name in NAMES),
            *(f"{LAYER}.{name}" for name in NAMES.values()),
        ),
    ),
    Bug(
        "keys_of_first",
        "the keys of the second group are those of the first",
        convert=keys_of_first,
        modules=(
            "groups.1.group_layers.0.mha.key",
            "encoder.albert_layer_groups.1.albert_layers.0.attention.key",
        ),
    ),
    Bug(
        "norms_swapped",
        "the norms of each layer are swapped",
        convert=norms_swapped,
        modules=(
            f"{BLOCK}.*_residual_layer_norm",
            f"{LAYER}.attention.LayerNorm",
            f"{LAYER}.full_layer_layer_norm",
        ),
    ),
    Bug(
        "projection_bias_left",
        "the bias behind the embeddings is not loaded",
        convert=projection_bias_left,
        modules=("embeddings.projection", "encoder.embedding_hidden_mapping_in"),
    ),
    Bug(
        "value_bias_left",
        "the bias of the values is not loaded",
        convert=value_bias_left,
        modules=(f"{BLOCK}.mha.value", f"{LAYER}.attention.value"),
    ),
    Bug(
        "wrong_eps",
        "eps of the norms is too large",
        settings={"layer_norm_eps": 1e-2},
        modules=(
            "embeddings.embed_output_layer_norm",
            "embeddings.LayerNorm",
            f"{BLOCK}.*_residual_layer_norm",
            f"{LAYER}.attention.LayerNorm",
            f"{LAYER}.full_layer_layer_norm",
        ),
    ),
    Bug(
        "in_turn",
        "the groups take turns, not one after the other",
        GROUP_BY_GROUP,
        IN_TURN,
        modules=("", "encoder"),
        also=(CALL,),
    ),
    Bug(
        "one_layer_less",
        "each group is run once too few",
        "for _ in range(layers_per_group):",
        "for _ in range(layers_per_group - 1):",
        modules=("", "encoder"),
        golden=(GROUP, LAYER),  # a call of it
        also=(CALL,),
    ),
    Bug(
        "places_off",
        "positions begin at one",
        "torch.arange(x.shape[1], device=x.device).expand(1, -1)",
        "torch.arange(1, x.shape[1] + 1, device=x.device).expand(1, -1)",
        modules=("embeddings", "embeddings.position_embeddings"),
        also=("position_embeddings = self.position_embeddings(positions)",),
    ),
    Bug(
        "no_segments",
        "all tokens are of the first segment",
        "embeddings += self.type_embeddings(type_ids)",
        "embeddings += self.type_embeddings(type_ids * 0)",
        modules=("embeddings", "embeddings.type_embeddings", "embeddings.token_type_embeddings"),
    ),
    Bug(
        "no_residual",
        "the residual is not added after attention",
        "self.attn_residual_layer_norm(input + attn_out)",
        "self.attn_residual_layer_norm(attn_out)",
        modules=(BLOCK, f"{LAYER}.attention"),
        golden=(f"{LAYER}.attention/Tensor.add",),
    ),
    Bug(
        "no_mask",
        "the padding is not masked",
        "return torch.where(self.bool_mask, input, blocked_value)",
        "return input",
        modules=(SCORER, f"{BLOCK}.mha", "", f"{LAYER}.attention"),
    ),
    Bug(
        "no_root",
        "scores are divided by the width of a head, not by its root",
        "attn_scores /= math.sqrt(width)",
        "attn_scores /= width",
        modules=(SCORER, f"{BLOCK}.mha", f"{LAYER}.attention"),
    ),
)

PORTS = (
    Port(
        "curated-albert",
        partial(source, "albert", "config", "layer_group", "encoder"),
        original,
        make,
        convert,
        golden_work,
        work,
        norms,
        BUGS,
        package="curated_transformers",
        missing=partial(packages.missing, "curated_transformers"),
    ),
)
