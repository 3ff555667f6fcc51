"""The text tower of OpenCLIP against that of CLIP in Hugging Face."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ports import packages
from ports.entry import Logits
from ports.made import ported
from ports.weights import Model, State, hugging_face, norms_of, renamed

WIDTH, HEADS, LAYERS, VOCABULARY, PLACES = 64, 4, 3, 512, 20  # texts fill all places
HEAD = WIDTH // HEADS
BLOCK, LAYER = "transformer.resblocks.*", "text_model.encoder.layers.*"
SETTINGS = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH,
    "projection_dim": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "max_position_embeddings": PLACES,
    "eos_token_id": 2,  # as published: the token with the largest id ends the text
    "attn_implementation": "sdpa",
}  # fmt: skip
# its own initialisation is far below the scale of trained weights
original = hugging_face("CLIPTextModelWithProjection", SETTINGS, std=0.12)
norms = norms_of(
    "text_model.encoder.layers",
    {"layer_norm1": "self_attn.{q,k,v}_proj", "layer_norm2": "mlp.fc1"},
    {"text_model.final_layer_norm": "text_projection"},
)


def ended(ids: torch.Tensor) -> torch.Tensor:
    """Return the text with its last token the one that ends it."""
    return torch.cat(
        [ids[:, :-1].clamp(max=VOCABULARY - 2), ids.new_full((1, 1), VOCABULARY - 1)], 1
    )


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(ended(ids)).text_embeds]


def work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(ended(ids))]


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


EMBEDDINGS = "text_model.embeddings"
NAMES = {
    "token_embedding": f"{EMBEDDINGS}.token_embedding",
    "positional_embedding": f"{EMBEDDINGS}.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    f"{BLOCK}.attn.in_proj_weight": f"{LAYER}.self_attn.{{q,k,v}}_proj.weight",
    f"{BLOCK}.attn.in_proj_bias": f"{LAYER}.self_attn.{{q,k,v}}_proj.bias",
    f"{BLOCK}.attn.out_proj": f"{LAYER}.self_attn.out_proj",
    f"{BLOCK}.ln_{{1,2}}": f"{LAYER}.layer_norm{{1,2}}",
    f"{BLOCK}.mlp.{{c_fc,c_proj}}": f"{LAYER}.mlp.{{fc1,fc2}}",
}


def convert(hf: Model) -> State:
    """Return the weights under OpenCLIP's names, q, k and v in one."""
    projection = {"text_projection": hf.text_projection.weight.T.contiguous()}
    return renamed(hf.state_dict(), NAMES) | projection


# the fused weight is a parameter of attention itself
ATTENTION = (f"{BLOCK}.attn", f"{LAYER}.self_attn")
NORMS = (f"{BLOCK}.ln_[12]", "ln_final", f"{LAYER}.layer_norm[12]", "text_model.final_layer_norm")
GELU = (f"{BLOCK}.mlp.gelu", f"{LAYER}.mlp.activation_fn")
IN_PROJ = f"{BLOCK}.attn.in_proj_{{weight,bias}}"
BUGS = r"""
qkv_order: keys and values are fused in the wrong order
    weights each(lambda w: reordered(w, (0, 2, 1)), IN_PROJ)
    in $ATTENTION $LAYER.self_attn.[kv]_proj
k_heads: the key heads are in another order
    weights each(lambda w: reordered(w, (0, 2, 1, 4, 3, 5), [WIDTH, *[HEAD] * 4, WIDTH]), IN_PROJ)
    in $ATTENTION $LAYER.self_attn.k_proj
by_head: q, k and v are fused head by head
    weights each(lambda w: turned(w, 3, HEADS), IN_PROJ)
    in $ATTENTION $LAYER.self_attn.[qkv]_proj
norms_swapped: the norms of each layer are swapped
    weights swap(f"{BLOCK}.ln_1", f"{BLOCK}.ln_2")
    in $NORMS
not_transposed: the projection is not transposed
    weights transpose("text_projection")
    in (root) text_projection
places_off: the embeddings of the positions are one off
    weights each(lambda places: places.roll(1, 0), "positional_embedding")
    in (root) $EMBEDDINGS $EMBEDDINGS.position_embedding
bias_left: a bias is not loaded
    weights each(torch.zeros_like, "transformer.resblocks.1.mlp.c_proj.bias")
    in transformer.resblocks.1.mlp.c_proj text_model.encoder.layers.1.mlp.fc2
layer_off: a weight is that of the layer before
    weights copy(*(f"transformer.resblocks.{n}.mlp.c_fc.weight" for n in (2, 1)))
    in transformer.resblocks.2.mlp.c_fc text_model.encoder.layers.2.mlp.fc1
wrong_eps: eps of the norms is too large
    settings {"eps": 0.01}
    in $NORMS
gelu: GELU for QuickGELU
    settings {"gelu": True}
    in $GELU
sigmoid_scale: QuickGELU has another factor
    - 1.702 * x
    + 1.5 * x
    in $GELU
no_residual: the residual is not added after attention
    - x = q_x + self.ls_1(
    + x = self.ls_1(
    in $BLOCK $LAYER
    golden $LAYER/Tensor.add
mask_off: the causal mask lets the next token through
    -         mask = torch.empty(self.num_pos, self.num_pos)
    -         mask.fill_(float("-inf"))
    -         mask.triu_(1)
    +         mask = torch.empty(self.num_pos, self.num_pos)
    +         mask.fill_(float("-inf"))
    +         mask.triu_(2)
    in (root) text_model $ATTENTION
    early
no_places: the embeddings of the positions are not added
    - x = x + self.positional_embedding[:seq_len].to(cast_dtype)
    -         return x, attn_mask
    + return x, attn_mask
    in (root) $EMBEDDINGS
    golden $EMBEDDINGS/Tensor.add $EMBEDDINGS.position_embedding
    golden $EMBEDDINGS.position_embedding/Functional.embedding
last_place: the token before the end is taken for the text
    - text.argmax(dim=-1)]
    + text.argmax(dim=-1) - 1]
    in (root) text_model
"""
PORTS = (ported(globals(), "open-clip", "open_clip", length=PLACES),)
