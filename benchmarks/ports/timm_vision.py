"""A vision transformer of timm, with fused QKV, against ViT of Hugging Face."""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ports import packages
from ports.entry import Logits
from ports.made import ported
from ports.weights import Model, hugging_face, norms_of

WIDTH, LAYERS, HEADS, CLASSES = 64, 4, 8, 50  # as many heads as channels in a head
IMAGE, PATCH, COLOURS = 24, 4, 3
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
MODEL = ("_create_attn", "Block", "global_pool_nlc", "VisionTransformer")
TAKEN = {
    "layers/patch_embed.py": ("PatchEmbed",),
    "layers/attention.py": ("Attention",),
    "layers/mlp.py": ("Mlp",),
    "models/vision_transformer.py": MODEL,
}
TORCHVISION: dict[str, dict[str, Any]] = {
    "torchvision": {},
    "torchvision__ops": {},
    "torchvision__ops__misc": {"FrozenBatchNorm2d": nn.BatchNorm2d},
}
SETTINGS = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 160, "image_size": IMAGE, "patch_size": PATCH, "num_labels": CLASSES,
    "layer_norm_eps": 1e-12,
    "vocab_size": LEVELS,  # of a pixel
    "attn_implementation": "eager",
}  # fmt: skip
original = hugging_face("ViTForImageClassification", SETTINGS, 0.12, stds={"position": 1, "cls": 1})
norms = norms_of(
    "vit.layers",
    {"layernorm_before": "attention.{q,k,v}_proj", "layernorm_after": "mlp.fc1"},
    {"vit.layernorm": "classifier"},
)


@cache
def source() -> Path:
    packages.file("timm", "")
    with packages.stand_ins(**TORCHVISION):  # timm asks for the class of a norm alone
        for name in ("layers", "layers.format", "layers.trace_utils", "layers.helpers"):
            import_module(f"timm.{name}")
    return packages.taken("timm", TAKEN, HEADER)


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
        "img_size": IMAGE, "patch_size": PATCH, "num_classes": CLASSES, "embed_dim": WIDTH,
        "depth": LAYERS, "num_heads": HEADS, "mlp_ratio": 160 / WIDTH,
        "norm_layer": partial(nn.LayerNorm, eps=eps), "weight_init": "skip",
    }  # fmt: skip
    return code.VisionTransformer(**{**given, **settings})


NAMES = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
    "blocks.*.{norm1,norm2}": "vit.layers.*.{layernorm_before,layernorm_after}",
    "blocks.*.attn.qkv.weight": "vit.layers.*.attention.{q,k,v}_proj.weight",
    "blocks.*.attn.qkv.bias": "vit.layers.*.attention.{q,k,v}_proj.bias",
    "blocks.*.attn.proj": "vit.layers.*.attention.o_proj",
    "blocks.*.mlp": "vit.layers.*.mlp",
}
ATTENTION = ("blocks.*.attn", f"{LAYER}.attention")
QKV = ("blocks.*.attn.qkv", f"{LAYER}.attention.[qkv]_proj")


BUGS = r"""
by_head: queries, keys and values are fused head by head
    weights each(lambda w: turned(w, 3, HEADS), "blocks.*.attn.qkv")
    in $QKV
transposed_patches: the kernels of the patches are transposed
    weights each(lambda kernels: kernels.mT, "patch_embed.proj.weight")
    in patch_embed.proj vit.embeddings.patch_embeddings.projection
class_last: the table of positions has the class behind the patches
    weights each(lambda places: places.roll(-1, dims=1), "pos_embed")
    in (root) vit.embeddings
value_bias_left: the bias of the values is zero, as BEiT's of the keys is
    weights each(lambda b: zeroed(b, 2 * WIDTH), "blocks.*.attn.qkv.bias")
    in blocks.*.attn.qkv $LAYER.attention.v_proj
norms_swapped: the norms of layer 2 are swapped
    weights swap("blocks.2.norm1", "blocks.2.norm2")
    in blocks.2.norm[12] vit.layers.2.layernorm_*
quick_gelu: the activation is CLIP's
    settings {"act_layer": "quick_gelu"}
    in blocks.*.mlp.act $LAYER.mlp.activation_fn
mean_pooled: patches are averaged in place of the class, as the head wants it
    settings {"global_pool": "avg", "fc_norm": False}
    in (root) vit classifier head
class_without_place: the class is put in front after the positions are added
    - x = torch.cat(to_cat + [x], dim=1)
    -             x = x + pos_embed
    + x = torch.cat(to_cat + [x], dim=1)
    +             x[:, 1:] = x[:, 1:] + pos_embed[:, 1:]
    in (root) vit.embeddings
patches_by_column: patches are numbered by column
    - x = x.flatten(2).transpose(1, 2)  # NCHW -> NLC
    + x = x.mT.flatten(2).transpose(1, 2)  # NCHW -> NLC
    in patch_embed vit.embeddings.patch_embeddings
channels_first: the fused projection is split into channels, then heads
    - .reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
    + .reshape(B, N, 3, self.head_dim, self.num_heads).permute(2, 0, 4, 1, 3)
    in $ATTENTION
heads_not_joined: heads are joined before the places are put in front again
    - x = x.transpose(1, 2).reshape(B, N, self.attn_dim)
    + x = x.reshape(B, N, self.attn_dim)
    in $ATTENTION
scaled_by_width: scores are scaled with the model's width
    -                 is_causal=is_causal,
    +                 is_causal=is_causal, scale=C**-0.5,
    in $ATTENTION
norm_after: the feed-forward part is normalised behind it, as Swin-v2's
    - self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
    + self.drop_path2(self.ls2(self.norm2(self.mlp(x))))
    in blocks.* blocks.*.norm2 $LAYER $LAYER.layernorm_after
causal: patches see those before them alone
    -                 is_causal=is_causal,
    +                 is_causal=True,
    in $ATTENTION
"""
PORTS = (ported(globals(), "timm-vit", "timm", package="", length=COLOURS * IMAGE * IMAGE),)
