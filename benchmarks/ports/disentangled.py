"""DeBERTa-v2 for one text, time first, with one input projection, against Hugging Face's."""

from __future__ import annotations

from ports.bugs import bugs
from ports.entry import Logits
from ports.weights import Model, State, hugging_face, norms
from ports.written import written

SETTINGS = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 32,
    "max_relative_positions": 32,
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    "conv_kernel_size": 3,
    "conv_act": "gelu",
    "tie_word_embeddings": False,
}


def golden_work(model: Model, ids: Logits) -> Logits:
    return [model(ids).logits]


def key_bias_dropped(state: State) -> None:
    bias = state["layers.1.attn.in_proj_bias"]
    third = len(bias) // 3
    bias[third : 2 * third] = 0


ENCODER = "deberta.encoder"
ATTENTION = ("layers.*.attn", f"{ENCODER}.layer.*.attention.self")
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
    weights key_bias_dropped
    in layers.1.attn $ENCODER.layer.1.attention.self.key_proj
"""
PORTS = (
    written(
        "disentangled",
        "Disentangled",
        hugging_face("DebertaV2ForMaskedLM", SETTINGS, std=0.15, stds={"embeddings": 0.5}),
        bugs(BUGS, globals()),
        golden_work=golden_work,
        # the outputs of the others are residuals too, or shared
        norms=norms(last={"cls.predictions.transform.LayerNorm": "cls.predictions.decoder"}),
        length=24,
    ),
)
