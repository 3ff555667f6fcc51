"""The text tower of OpenCLIP against that of CLIP in Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from ports import packages
from ports.entry import Bug, Logits, Model, Port, State, spread

WIDTH, HEADS, LAYERS, VOCABULARY, PLACES = 64, 4, 3, 512, 20  # texts fill all places
HEAD = WIDTH // HEADS
BLOCK, LAYER = "transformer.resblocks.*", "text_model.encoder.layers.*"
NAMES = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def original(seed: int) -> Model:
    """Return the text model with its projection."""
    torch.manual_seed(seed)
    config = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=PLACES,
        eos_token_id=2,  # as published: the token with the largest id ends the text
        attn_implementation="sdpa",
    )
    model = transformers.CLIPTextModelWithProjection(config)
    with torch.no_grad():  # its own initialisation is far below the scale of trained weights
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.12)
    return spread(model, seed)


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    for layer in hf.text_model.encoder.layers:
        a = layer.self_attn
        yield layer.layer_norm1, [a.q_proj, a.k_proj, a.v_proj]
        yield layer.layer_norm2, [layer.mlp.fc1]
    yield hf.text_model.final_layer_norm, [hf.text_projection]


def ended(ids: torch.Tensor) -> torch.Tensor:
    """Return the text with its last token the one that ends it."""
    return torch.cat(
        [ids[:, :-1].clamp(max=VOCABULARY - 2), ids.new_full((1, 1), VOCABULARY - 1)], 1
    )


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(ended(ids)).text_embeds]


def work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(ended(ids))]


# -- the port ------------------------------------------------------------------------------------


def source() -> Path:
    stub = {"to_2tuple": None, "feature_take_indices": None}  # for images; wants torchvision
    return packages.file("open_clip", "transformer.py", utils=stub)


def make(code: ModuleType, hf: Model, eps: float = 0.0, gelu: bool = False) -> Model:
    """Return OpenCLIP's text tower. ``eps``: of its norms. ``gelu``: not QuickGELU."""
    settings: dict[str, Any] = {"act_layer": torch.nn.GELU if gelu else code.QuickGELU}
    if eps:
        settings["norm_layer"] = partial(code.LayerNorm, eps=eps)
    return code.TextTransformer(
        context_length=PLACES,
        vocab_size=VOCABULARY,
        width=WIDTH,
        heads=HEADS,
        layers=LAYERS,
        output_dim=WIDTH,
        **settings,
    )


def convert(hf: Model) -> State:
    """Return the weights under OpenCLIP's names, q, k and v in one."""
    given, state = hf.state_dict(), {}
    embeddings = "text_model.embeddings"
    state["token_embedding.weight"] = given[f"{embeddings}.token_embedding.weight"]
    state["positional_embedding"] = given[f"{embeddings}.position_embedding.weight"]
    state["text_projection"] = given["text_projection.weight"].T.contiguous()
    for kind in ("weight", "bias"):
        state[f"ln_final.{kind}"] = given[f"text_model.final_layer_norm.{kind}"]
        for n in range(LAYERS):
            old, new = f"text_model.encoder.layers.{n}", f"transformer.resblocks.{n}"
            parts = [given[f"{old}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
            state[f"{new}.attn.in_proj_{kind}"] = torch.cat(parts)
            for ours, theirs in NAMES.items():
                state[f"{new}.{ours}.{kind}"] = given[f"{old}.{theirs}.{kind}"]
    return state


# -- changes of weights --------------------------------------------------------------------------


def in_proj(order: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    """Return what puts the rows of the fused q, k and v of each layer in another order."""

    def change(state: State) -> None:
        for n in range(LAYERS):
            for kind in ("weight", "bias"):
                name = f"transformer.resblocks.{n}.attn.in_proj_{kind}"
                state[name] = state[name][order(torch.arange(3 * WIDTH))]

    return change


def v_before_k(n: torch.Tensor) -> torch.Tensor:
    q, k, v = n.chunk(3)
    return torch.cat([q, v, k])


def k_heads(n: torch.Tensor) -> torch.Tensor:
    q, k, v = n.chunk(3)
    return torch.cat([q, k.view(HEADS, HEAD)[[1, 0, 3, 2]].flatten(), v])


def by_head(n: torch.Tensor) -> torch.Tensor:
    """Take q, k and v of one head after the other."""
    return n.view(3, HEADS, HEAD).transpose(0, 1).flatten()


def norms_swapped(state: State) -> None:
    for n in range(LAYERS):
        for kind in ("weight", "bias"):
            a, b = (f"transformer.resblocks.{n}.ln_{i}.{kind}" for i in (1, 2))
            state[a], state[b] = state[b], state[a]


def not_transposed(state: State) -> None:
    state["text_projection"] = state["text_projection"].T.contiguous()


def places_off(state: State) -> None:
    state["positional_embedding"] = state["positional_embedding"].roll(1, 0)


def bias_left(state: State) -> None:
    state["transformer.resblocks.1.mlp.c_proj.bias"].zero_()


def layer_before(state: State) -> None:
    name = "transformer.resblocks.{}.mlp.c_fc.weight"
    state[name.format(2)] = state[name.format(1)].clone()


# -- bugs ----------------------------------------------------------------------------------------

MASK = """        mask = torch.empty(self.num_pos, self.num_pos)
        mask.fill_(float("-inf"))
        mask.triu_(1)"""
# the fused weight is a parameter of attention itself
ATTENTION = (f"{BLOCK}.attn", f"{LAYER}.self_attn")
NORMS = (f"{BLOCK}.ln_[12]", "ln_final", f"{LAYER}.layer_norm[12]", "text_model.final_layer_norm")
GELU = (f"{BLOCK}.mlp.gelu", f"{LAYER}.mlp.activation_fn")

BUGS = (
    Bug(
        "qkv_order",
        "keys and values are fused in the wrong order",
        convert=in_proj(v_before_k),
        modules=(*ATTENTION, f"{LAYER}.self_attn.[kv]_proj"),
    ),
    Bug(
        "k_heads",
        "the key heads are in another order",
        convert=in_proj(k_heads),
        modules=(*ATTENTION, f"{LAYER}.self_attn.k_proj"),
    ),
    Bug(
        "by_head",
        "q, k and v are fused head by head",
        convert=in_proj(by_head),
        modules=(*ATTENTION, f"{LAYER}.self_attn.[qkv]_proj"),
    ),
    Bug(
        "norms_swapped", "the norms of each layer are swapped", convert=norms_swapped, modules=NORMS
    ),
    Bug(
        "not_transposed",
        "the projection is not transposed",
        convert=not_transposed,
        modules=("", "text_projection"),
    ),
    Bug(
        "places_off",
        "the embeddings of the positions are one off",
        convert=places_off,
        modules=("", "text_model.embeddings", "text_model.embeddings.position_embedding"),
    ),
    Bug(
        "bias_left",
        "a bias is not loaded",
        convert=bias_left,
        modules=("transformer.resblocks.1.mlp.c_proj", "text_model.encoder.layers.1.mlp.fc2"),
    ),
    Bug(
        "layer_off",
        "a weight is that of the layer before",
        convert=layer_before,
        modules=("transformer.resblocks.2.mlp.c_fc", "text_model.encoder.layers.2.mlp.fc1"),
    ),
    Bug("wrong_eps", "eps of the norms is too large", settings={"eps": 1e-2}, modules=NORMS),
    Bug("gelu", "GELU for QuickGELU", settings={"gelu": True}, modules=GELU),
    Bug("sigmoid_scale", "QuickGELU has another factor", "1.702 * x", "1.5 * x", modules=GELU),
    Bug(
        "no_residual",
        "the residual is not added after attention",
        "x = q_x + self.ls_1(",
        "x = self.ls_1(",
        modules=(BLOCK, LAYER),
        golden=(f"{LAYER}/Tensor.add",),
    ),
    Bug(
        "mask_off",
        "the causal mask lets the next token through",
        MASK,
        MASK.replace("triu_(1)", "triu_(2)"),
        modules=("", "text_model", *ATTENTION),
        early=True,
    ),
    Bug(
        "no_places",
        "the embeddings of the positions are not added",
        "x = x + self.positional_embedding[:seq_len].to(cast_dtype)\n        return x, attn_mask",
        "return x, attn_mask",
        modules=("", "text_model.embeddings"),
        golden=(
            "text_model.embeddings/Tensor.add",
            "text_model.embeddings.position_embedding",
            "text_model.embeddings.position_embedding/Functional.embedding",
        ),
    ),
    Bug(
        "last_place",
        "the token before the end is taken for the text",
        "text.argmax(dim=-1)]",
        "text.argmax(dim=-1) - 1]",
        modules=("", "text_model"),
    ),
)

PORTS = (
    Port(
        "open-clip",
        source,
        original,
        make,
        convert,
        golden_work,
        work,
        norms,
        BUGS,
        length=PLACES,
        package="open_clip",
        missing=partial(packages.missing, "open_clip"),
    ),
)
