"""DeBERTa-v2 for one text, time first, with one input projection, against Hugging Face's."""

from __future__ import annotations

import torch

from ports.entry import Logits
from ports.made import written
from ports.weights import Model, State, hugging_face, norms_of, renamed

SETTINGS = {
    "vocab_size": 384, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 32, "max_relative_positions": 32,
    "relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    "type_vocab_size": 0, "conv_kernel_size": 3, "conv_act": "gelu", "tie_word_embeddings": False,
}  # fmt: skip
original = hugging_face("DebertaV2ForMaskedLM", SETTINGS, std=0.15, stds={"embeddings": 0.5})
# the outputs of the others are residuals too, or shared
norms = norms_of(last={"cls.predictions.transform.LayerNorm": "cls.predictions.decoder"})
ENCODER = "deberta.encoder"
OWN = f"{ENCODER}.layer.*.attention"
NAMES = {
    "words": "deberta.embeddings.word_embeddings",
    "words_norm": "deberta.embeddings.LayerNorm",
    "distances": f"{ENCODER}.rel_embeddings.weight",
    "distances_norm": f"{ENCODER}.LayerNorm",
    "conv.bias": f"{ENCODER}.conv.conv.bias",
    "conv.norm": f"{ENCODER}.conv.LayerNorm",
    "head.{dense,norm}": "cls.predictions.transform.{dense,LayerNorm}",
    "head.out": "cls.predictions.decoder",
    "layers.*.attn.in_proj_weight": f"{OWN}.self.{{query,key,value}}_proj.weight",
    "layers.*.attn.in_proj_bias": f"{OWN}.self.{{query,key,value}}_proj.bias",
    "layers.*.attn.out_proj": f"{OWN}.output.dense",
    "layers.*.attn_norm": f"{OWN}.output.LayerNorm",
    "layers.*.{fc1,fc2}": f"{ENCODER}.layer.*.{{intermediate,output}}.dense",
    "layers.*.final_norm": f"{ENCODER}.layer.*.output.LayerNorm",
}


def convert(hf: Model) -> State:
    taps = hf.deberta.encoder.conv.conv.weight.permute(2, 1, 0)
    return renamed(hf.state_dict(), NAMES) | {"conv.taps": taps}


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(ids).logits]


ATTENTION = ("layers.*.attn", f"{OWN}.self")
BUGS = r"""
scale_of_bert: scores are divided by the root of the head's width, not of three times it
    - math.sqrt(3 * self.dim)
    + math.sqrt(self.dim)
    in $ATTENTION
distance_backwards: scores of positions and contents are looked up with the distance the other way
    - rel_q, k).gather(1, index)
    + rel_q, k).gather(1, index.mT)
    in $ATTENTION
distances_not_normed: the embeddings of distances are not normalised
    - rel = self.distances_norm(self.distances)
    + rel = self.distances
    in (root) distances_norm $ENCODER.LayerNorm
    golden $ENCODER.LayerNorm $ENCODER.LayerNorm/*.*
    also both = F.linear(rel
buckets_rounded_down: the buckets of far distances are rounded down, not up
    - torch.ceil(steps)
    + torch.floor(steps)
    in (root) $ENCODER $ATTENTION
    also rel_k).gather(2, index)
    also rel_q, k).gather(1, index)
convolution_of_the_layer: the convolution takes the output of the first layer, not its input
    - x = self.conv(embedded, x)
    + x = self.conv(x, x)
    in (root) conv $ENCODER $ENCODER.conv $ENCODER.conv.conv
key_bias_dropped: the fused bias of layer 1 has zeros for the keys
    weights each(lambda b: zeroed(b, 64, 128), "layers.1.attn.in_proj_bias")
    in layers.1.attn $ENCODER.layer.1.attention.self.key_proj
"""
PORTS = (written(globals(), "disentangled", "Disentangled", length=24),)
