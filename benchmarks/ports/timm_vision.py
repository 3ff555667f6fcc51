"""A vision transformer of timm, with fused QKV, against ViT of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from ports import packages
from ports.entry import Bug, Logits, Model, Port, State, spread

WIDTH, LAYERS, HEADS, CLASSES = 64, 4, 8, 50  # as many heads as channels in a head
IMAGE, PATCH, COLOURS = 24, 4, 3
PIXELS = COLOURS * IMAGE * IMAGE
LEVELS = 256
LAYER = "vit.layers.*"
HEADER = """from __future__ import annotations
import math
from functools import partial
from typing import *
import torch
import torch.nn.functional as F
from torch import nn
from torch.jit import Final
from timm.layers import *
from timm.layers.format import Format, nchw_to
from timm.layers.helpers import to_2tuple
from timm.layers.trace_utils import _assert
"""
TAKEN = {
    "layers/patch_embed.py": ("PatchEmbed",),
    "layers/attention.py": ("Attention",),
    "layers/mlp.py": ("Mlp",),
    "models/vision_transformer.py": (
        "_create_attn",
        "Block",
        "global_pool_nlc",
        "VisionTransformer",
    ),
}

TORCHVISION: dict[str, dict[str, Any]] = {
    "torchvision": {},
    "torchvision__ops": {},
    "torchvision__ops__misc": {"FrozenBatchNorm2d": nn.BatchNorm2d},
}


@cache
def source() -> Path:
    packages.file("timm", "")
    with packages.stand_ins(**TORCHVISION):  # timm asks for the class of a norm alone
        for name in ("layers", "layers.format", "layers.trace_utils", "layers.helpers"):
            import_module(f"timm.{name}")
    return packages.taken("timm", TAKEN, HEADER)


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=160,
        image_size=IMAGE,
        patch_size=PATCH,
        num_labels=CLASSES,
        layer_norm_eps=1e-12,
        vocab_size=LEVELS,  # of a pixel
        attn_implementation="eager",
    )
    model = transformers.ViTForImageClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1 if "position" in name or "cls" in name else 0.12)
    return spread(model, seed)


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    for layer in hf.vit.layers:
        a = layer.attention
        yield layer.layernorm_before, [a.q_proj, a.k_proj, a.v_proj]
        yield layer.layernorm_after, [layer.mlp.fc1]
    yield hf.vit.layernorm, [hf.classifier]


def image(model: Model, ids: torch.Tensor) -> torch.Tensor:
    pixels = ids.view(1, COLOURS, IMAGE, IMAGE) / (LEVELS / 2) - 1
    return pixels.to(next(model.parameters()).dtype)


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(image(model, ids)).logits]


def work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(image(model, ids))]


def make(code: ModuleType, hf: Model, eps: float = 1e-12, **settings: Any) -> Model:
    code.ATTN_LAYERS = {"": code.Attention}
    given: dict[str, Any] = {
        "img_size": IMAGE,
        "patch_size": PATCH,
        "num_classes": CLASSES,
        "embed_dim": WIDTH,
        "depth": LAYERS,
        "num_heads": HEADS,
        "mlp_ratio": 160 / WIDTH,
        "norm_layer": partial(nn.LayerNorm, eps=eps),
        "weight_init": "skip",
    }
    return code.VisionTransformer(**{**given, **settings})


NAMES = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def convert(hf: Model) -> State:
    given = hf.state_dict()
    state = {
        "cls_token": given["vit.embeddings.cls_token"],
        "pos_embed": given["vit.embeddings.position_embeddings"],
    }
    for kind in ("weight", "bias"):
        patches = given[f"vit.embeddings.patch_embeddings.projection.{kind}"]
        state[f"patch_embed.proj.{kind}"] = patches
        state[f"norm.{kind}"] = given[f"vit.layernorm.{kind}"]
        state[f"head.{kind}"] = given[f"classifier.{kind}"]
        for n in range(LAYERS):
            old, new = f"vit.layers.{n}", f"blocks.{n}"
            for ours, theirs in NAMES.items():
                state[f"{new}.{ours}.{kind}"] = given[f"{old}.{theirs}.{kind}"]
            parts = [given[f"{old}.attention.{x}_proj.{kind}"] for x in "qkv"]
            state[f"{new}.attn.qkv.{kind}"] = torch.cat(parts)
    return state


# -- changes of weights --------------------------------------------------------------------------


def qkv(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    """Return what changes the fused weights and biases of all layers."""

    def convert(state: State) -> None:
        for n in range(LAYERS):
            for kind in ("weight", "bias"):
                name = f"blocks.{n}.attn.qkv.{kind}"
                state[name] = change(state[name]).clone()

    return convert


def by_head(rows: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(0, (3, HEADS, -1)).transpose(0, 1).flatten(0, 2)


def transposed_patches(state: State) -> None:
    """Read the kernels as [width, height], as a converter from another framework would."""
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].mT.clone()


def class_last(state: State) -> None:
    """Place the class behind the patches in the table of positions."""
    state["pos_embed"] = state["pos_embed"].roll(-1, dims=1)


def value_bias_left(state: State) -> None:
    for n in range(LAYERS):
        state[f"blocks.{n}.attn.qkv.bias"][2 * WIDTH :] = 0


def norms_swapped(state: State) -> None:
    for kind in ("weight", "bias"):
        a, b = (f"blocks.2.norm{k}.{kind}" for k in (1, 2))
        state[a], state[b] = state[b], state[a]


ATTENTION = ("blocks.*.attn", f"{LAYER}.attention")
QKV = ("blocks.*.attn.qkv", f"{LAYER}.attention.[qkv]_proj")
FUSED = """                dropout_p=self.attn_drop.p if self.training else 0.,
                is_causal=is_causal,"""
BUGS = (
    Bug(
        "by_head",
        "queries, keys and values are fused head by head",
        convert=qkv(by_head),
        modules=QKV,
    ),
    Bug(
        "transposed_patches",
        "the kernels of the patches are transposed",
        convert=transposed_patches,
        modules=("patch_embed.proj", "vit.embeddings.patch_embeddings.projection"),
    ),
    Bug(
        "class_last",
        "the table of positions has the class behind the patches",
        convert=class_last,
        modules=("", "vit.embeddings"),
    ),
    Bug(
        "value_bias_left",
        "the bias of the values is zero, as BEiT's of the keys is",
        convert=value_bias_left,
        modules=("blocks.*.attn.qkv", f"{LAYER}.attention.v_proj"),
    ),
    Bug(
        "norms_swapped",
        "the norms of layer 2 are swapped",
        convert=norms_swapped,
        modules=("blocks.2.norm[12]", "vit.layers.2.layernorm_*"),
    ),
    Bug(
        "quick_gelu",
        "the activation is CLIP's",
        settings={"act_layer": "quick_gelu"},
        modules=("blocks.*.mlp.act", f"{LAYER}.mlp.activation_fn"),
    ),
    Bug(
        "mean_pooled",
        "patches are averaged in place of the class, as the head wants it",
        settings={"global_pool": "avg", "fc_norm": False},
        modules=("", "vit", "classifier", "head"),
    ),
    Bug(
        "class_without_place",
        "the class is put in front after the positions are added",
        old="x = torch.cat(to_cat + [x], dim=1)\n            x = x + pos_embed\n",
        new="x = torch.cat(to_cat + [x], dim=1)\n"
        "            x[:, 1:] = x[:, 1:] + pos_embed[:, 1:]\n",
        modules=("", "vit.embeddings"),
    ),
    Bug(
        "patches_by_column",
        "patches are numbered by column",
        old="x = x.flatten(2).transpose(1, 2)  # NCHW -> NLC",
        new="x = x.mT.flatten(2).transpose(1, 2)  # NCHW -> NLC",
        modules=("patch_embed", "vit.embeddings.patch_embeddings"),
    ),
    Bug(
        "channels_first",
        "the fused projection is split into channels, then heads",
        old=".reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)",
        new=".reshape(B, N, 3, self.head_dim, self.num_heads).permute(2, 0, 4, 1, 3)",
        modules=ATTENTION,
    ),
    Bug(
        "heads_not_joined",
        "heads are joined before the places are put in front again",
        old="x = x.transpose(1, 2).reshape(B, N, self.attn_dim)",
        new="x = x.reshape(B, N, self.attn_dim)",
        modules=ATTENTION,
    ),
    Bug(
        "scaled_by_width",
        "scores are scaled with the model's width",
        old=FUSED,
        new=FUSED.replace("is_causal,", "is_causal, scale=C**-0.5,"),
        modules=ATTENTION,
    ),
    Bug(
        "norm_after",
        "the feed-forward part is normalised behind it, as Swin-v2's",
        old="self.drop_path2(self.ls2(self.mlp(self.norm2(x))))",
        new="self.drop_path2(self.ls2(self.norm2(self.mlp(x))))",
        modules=("blocks.*", "blocks.*.norm2", LAYER, f"{LAYER}.layernorm_after"),
    ),
    Bug(
        "causal",
        "patches see those before them alone",
        old=FUSED,
        new=FUSED.replace("=is_causal", "=True"),
        modules=ATTENTION,
    ),
)
PORTS = (
    Port(
        "timm-vit",
        source,
        original,
        make,
        convert,
        golden_work,
        work,
        norms,
        BUGS,
        length=PIXELS,
        missing=partial(packages.missing, "timm"),
    ),
)
