"""The ESM-2 of its authors, a model of proteins, against that of Hugging Face."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from ports import packages
from ports.entry import Bug, Logits, Model, Port, State, spread

WIDTH, HEADS, LAYERS, VOCABULARY = 64, 4, 3, 33
HEAD = WIDTH // HEADS
BLOCK, LAYER = "layers.*", "esm.encoder.layer.*"
MASK, LENGTH = 32, 24


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.EsmConfig(
        vocab_size=VOCABULARY,
        mask_token_id=MASK,
        pad_token_id=1,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        position_embedding_type="rotary",
        emb_layer_norm_before=False,
        token_dropout=True,
        layer_norm_eps=1e-5,
        initializer_range=0.12,
        attn_implementation="sdpa",
    )
    model = transformers.EsmForMaskedLM(config)
    with torch.no_grad():  # a bias that only the head has, and as large as the logits
        model.lm_head.bias.normal_(0, 0.3)
    return spread(model, seed)


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    for layer in hf.esm.encoder.layer:
        a = layer.attention.self
        yield layer.attention.LayerNorm, [a.query, a.key, a.value]
        yield layer.LayerNorm, [layer.intermediate.dense]
    yield hf.esm.encoder.emb_layer_norm_after, [hf.lm_head.dense]


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


# -- the port ------------------------------------------------------------------------------------


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
            cos, sin = module._update_cos_sin_tables(torch.empty(1, LENGTH, HEAD))
            module._cos_cached, module._sin_cached = cos.to(dtype), sin.to(dtype)


NAMES = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "LayerNorm",
}


def convert(hf: Model) -> State:
    """Return the weights under the names of ESM's authors."""
    given = hf.state_dict()
    tied = given["esm.embeddings.word_embeddings.weight"]
    state = {
        "embed_tokens.weight": tied,
        "lm_head.weight": tied,
        "lm_head.bias": given["lm_head.bias"],
        "contact_head.regression.weight": torch.zeros(1, LAYERS * HEADS),  # not used
        "contact_head.regression.bias": torch.zeros(1),
    }
    pairs = {
        "emb_layer_norm_after": "esm.encoder.emb_layer_norm_after",
        "lm_head.dense": "lm_head.dense",
        "lm_head.layer_norm": "lm_head.layer_norm",
    }
    for n in range(LAYERS):
        for ours, theirs in NAMES.items():
            pairs[f"layers.{n}.{ours}"] = f"esm.encoder.layer.{n}.{theirs}"
    for ours, theirs in pairs.items():
        for kind in ("weight", "bias"):
            state[f"{ours}.{kind}"] = given[f"{theirs}.{kind}"]
    return state


# -- changes of weights --------------------------------------------------------------------------


def each(change: Callable[[State, str], None]) -> Callable[[State], None]:
    """Return what changes the weights of each layer. ``change(state, path of the layer)``."""

    def apply(state: State) -> None:
        for n in range(LAYERS):
            change(state, f"layers.{n}")

    return apply


def swap(a: str, b: str) -> Callable[[State, str], None]:
    def change(state: State, path: str) -> None:
        for kind in ("weight", "bias"):
            first, second = f"{path}.{a}.{kind}", f"{path}.{b}.{kind}"
            state[first], state[second] = state[second], state[first]

    return change


def rope_layout(state: State, path: str) -> None:
    for part in ("q", "k"):
        for kind in ("weight", "bias"):
            name = f"{path}.self_attn.{part}_proj.{kind}"
            rows = torch.arange(WIDTH).view(HEADS, 2, -1).transpose(1, 2).flatten()
            state[name] = state[name][rows]


def transposed(state: State, path: str) -> None:
    name = f"{path}.self_attn.v_proj.weight"
    state[name] = state[name].T.contiguous()


def layer_before(state: State) -> None:
    state["layers.2.fc1.weight"] = state["layers.1.fc1.weight"].clone()


def head_bias_left(state: State) -> None:
    state["lm_head.bias"].zero_()


def last_norm_left(state: State) -> None:
    state["emb_layer_norm_after.weight"].fill_(1)
    state["emb_layer_norm_after.bias"].zero_()


# -- bugs ----------------------------------------------------------------------------------------

ATTENTION = (f"{BLOCK}.self_attn", f"{LAYER}.attention.self")
BUGS = (
    Bug(
        "rope_layout",
        "q and k are ordered for interleaved RoPE",
        convert=each(rope_layout),
        modules=(
            f"{BLOCK}.self_attn.[qk]_proj",
            f"{LAYER}.attention.self.query",
            f"{LAYER}.attention.self.key",
        ),
    ),
    Bug(
        "norms_swapped",
        "the two norms of each layer are swapped",
        convert=each(swap("self_attn_layer_norm", "final_layer_norm")),
        modules=(
            f"{BLOCK}.self_attn_layer_norm",
            f"{BLOCK}.final_layer_norm",
            f"{LAYER}.attention.LayerNorm",
            f"{LAYER}.LayerNorm",
        ),
    ),
    Bug(
        "transposed",
        "the value projection is transposed",
        convert=each(transposed),
        modules=(f"{BLOCK}.self_attn.v_proj", f"{LAYER}.attention.self.value"),
    ),
    Bug(
        "layer_off",
        "a weight is that of the layer before",
        convert=layer_before,
        modules=("layers.2.fc1", "esm.encoder.layer.2.intermediate.dense"),
    ),
    Bug(
        "head_bias_left",
        "the bias of the head is not loaded",
        convert=head_bias_left,
        modules=("lm_head", "lm_head.decoder"),
    ),
    Bug(
        "last_norm_left",
        "the last norm is not loaded",
        convert=last_norm_left,
        modules=("emb_layer_norm_after", "esm.encoder.emb_layer_norm_after"),
    ),
    Bug(
        "no_token_dropout",
        "embeddings are not scaled by the share of masked tokens",
        settings={"token_dropout": False},
        modules=("", "esm.embeddings"),
        golden=("esm.embeddings/Tensor.mul", "esm.embeddings/Tensor.masked_fill"),
    ),
    Bug(
        "rope_base",
        "the base of RoPE is another one",
        "inv_freq = 1.0 / (10000 **",
        "inv_freq = 1.0 / (1000 **",
        modules=(f"{BLOCK}.self_attn.rot_emb", "esm.rotary_embeddings"),
        early=True,
    ),
    Bug(
        "no_scale",
        "scores are scaled with the width of the model",
        "self.scaling = self.head_dim**-0.5",
        "self.scaling = self.embed_dim**-0.5",
        modules=ATTENTION,
        early=True,
    ),
    Bug(
        "rotate_sign",
        "RoPE turns the other way",
        "return torch.cat((-x2, x1), dim=-1)",
        "return torch.cat((x2, -x1), dim=-1)",
        modules=(f"{BLOCK}.self_attn.rot_emb", f"{LAYER}.attention.self"),
    ),
    Bug(
        "gelu",
        "GELU is the one by sigmoid",
        "return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))",
        "return x * torch.sigmoid(1.702 * x)",
        modules=(BLOCK, f"{LAYER}.intermediate", "lm_head"),
        golden=(f"{LAYER}.intermediate/Torch.erf",),
    ),
    Bug(
        "post_norm",
        "the residual is the normalised input of the feed-forward layer",
        "        residual = x\n        x = self.final_layer_norm(x)\n        x = gelu(self.fc1(x))",
        "        x = self.final_layer_norm(x)\n        residual = x\n        x = gelu(self.fc1(x))",
        modules=(BLOCK, LAYER, f"{LAYER}.output"),
        also=("gelu(self.fc1(x)) ... x = residual + x",),
    ),
)

PORTS = (
    Port(
        "esm2",
        source,
        original,
        make,
        convert,
        golden_work,
        work,
        norms,
        BUGS,
        length=LENGTH,
        package="esm",
        prepare=prepare,
        missing=partial(packages.missing, "esm"),
    ),
)
