"""T5 with fused projections, which prepares the source for all decoder layers at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ports.entry import Logits
from ports.made import written
from ports.steps import run, translate
from ports.weights import Model, State, each, hugging_face, renamed

LAYERS, SOURCE = 3, 13  # the other ids are the target
ENCODER, DECODER = "encoder.block.*.layer", "decoder.block.*.layer"
SETTINGS = {
    "vocab_size": 512, "d_model": 64, "d_kv": 12, "d_ff": 96, "num_layers": LAYERS,
    "num_decoder_layers": LAYERS, "num_heads": 4, "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 20, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
original = hugging_face(
    "T5ForConditionalGeneration", SETTINGS, 0.12, stds={"relative": 1, "shared": 1}
)
BIAS = "{encoder,decoder}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
NAMES = {
    "tokens": "shared",
    "head": "lm_head",
    "{encoder,decoder}_bias.table": BIAS,
    "{encoder,decoder}_norm.g": "{encoder,decoder}.final_layer_norm.weight",
    "*.*.attn.in_proj": "*.block.*.layer.0.SelfAttention.{q,k,v}",
    "*.*.attn.out_proj": "*.block.*.layer.0.SelfAttention.o",
    "*.*.attn_norm.g": "*.block.*.layer.0.layer_norm.weight",
    "decoder.*.cross.{q_proj,out_proj}": "decoder.block.*.layer.1.EncDecAttention.{q,o}",
    "decoder.*.cross_norm.g": "decoder.block.*.layer.1.layer_norm.weight",
}
for side, last in (("encoder", 1), ("decoder", 2)):
    block = f"{side}.block.*.layer.{last}"
    NAMES |= {
        f"{side}.*.ff.wi": f"{block}.DenseReluDense.{{wi_0,wi_1}}",
        f"{side}.*.ff.wo": f"{block}.DenseReluDense.wo",
        f"{side}.*.ff_norm.g": f"{block}.layer_norm.weight",
    }


def convert(hf: Model) -> State:
    state = renamed(hf.state_dict(), NAMES)
    each(lambda table: table.T, "{encoder,decoder}_bias.table")(state)
    cross = [block.layer[1].EncDecAttention for block in hf.decoder.block]
    state["source_kv.weight"] = torch.cat([x.weight for a in cross for x in (a.k, a.v)])
    return state


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms but the decoder's last one: what takes its output is the embedding too."""
    for stack in (hf.encoder, hf.decoder):
        for block in stack.block:
            own, dense = block.layer[0], block.layer[-1]
            a, d = own.SelfAttention, dense.DenseReluDense
            yield own.layer_norm, [a.q, a.k, a.v]
            if stack is hf.decoder:
                yield block.layer[1].layer_norm, [block.layer[1].EncDecAttention.q]
            yield dense.layer_norm, [d.wi_0, d.wi_1]
    cross = [block.layer[1].EncDecAttention for block in hf.decoder.block]
    yield hf.encoder.final_layer_norm, [x for a in cross for x in (a.k, a.v)]


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    return translate(model, ids[:, :SOURCE], ids[:, SOURCE:])


def work(model: Model, ids: torch.Tensor) -> Logits:
    return run(model, ids[:, :SOURCE], ids[:, SOURCE:])


OWN, DENSE = f"{ENCODER}.0.SelfAttention", f"{ENCODER}.1.DenseReluDense"
SELF = ("encoder.*.attn", "decoder.*.attn", OWN, f"{DECODER}.0.SelfAttention")
FORWARD = ("encoder.*.ff", "decoder.*.ff", DENSE, f"{DECODER}.2.DenseReluDense")
FIRST_ENCODER = "encoder.block.0.layer.0.SelfAttention"
FIRST_DECODER = "decoder.block.0.layer.0.SelfAttention"
BUGS = r"""
scaled: scores of self-attention are scaled, as T5's are not
    -         scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    +         scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    in $SELF
looks_both_ways: the decoder's distances have buckets for both directions
    - DistanceBias(cfg, both_ways=False)
    + DistanceBias(cfg, both_ways=True)
    in decoder_bias $FIRST_DECODER $FIRST_DECODER.relative_attention_bias
    early
bias_of_the_first_alone: the first encoder layer alone gets the bias
    -             x = layer(x, bias)
    +             x, bias = layer(x, bias), torch.zeros(())
    in (root) encoder.*.attn $OWN
    also scores = scores + bias
head_scaled: the head is scaled as that of version 1.0
    - return self.head(x)
    + return self.head(x * x.shape[-1] ** -0.5)
    in (root) head lm_head
gate_from_linear: the activation is applied to the linear half
    - gate, linear = self.wi(x).chunk(2, dim=-1)
    + linear, gate = self.wi(x).chunk(2, dim=-1)
    in $FORWARD
    also return self.wo(F.gelu(
direction_swapped: keys before the query get the buckets of those behind it
    - first = buckets if distance > 0 else 0
    + first = buckets if distance < 0 else 0
    in encoder_bias $FIRST_ENCODER $FIRST_ENCODER.relative_attention_bias
    also return self.table[:, torch.tensor(places)]
source_not_normed: the decoder looks at the source before its last norm
    -         x = self.encoder_norm(x)
    in (root) encoder.final_layer_norm source_kv
    golden encoder.final_layer_norm*
    also kv = self.source_kv(x)
cross_not_normed: cross-attention takes its queries from before the norm
    - x + self.cross(self.cross_norm(x), keys, values)
    + x + self.cross(x, keys, values)
    in decoder.* $DECODER.1.layer_norm $DECODER.1
    golden $DECODER.1.layer_norm*
decoding_from_zero: while decoding, distances are those of the first place
    - bias = self.decoder_bias(start, new, end)
    + bias = self.decoder_bias(0, new, end)
    in (root) decoder_bias $FIRST_DECODER
    also return self.table[:, torch.tensor(places)]
sees_one_ahead: the decoder's mask lets the next token through
    - .triu(start + 1)
    + .triu(start + 2)
    in (root) decoder decoder.*.attn $DECODER.0.SelfAttention
    also bias = bias.masked_fill(ahead
one_bias: the converter loads the encoder's bias for the decoder
    weights copy("decoder_bias.table", "encoder_bias.table")
    in decoder_bias $FIRST_DECODER $FIRST_DECODER.relative_attention_bias
kinds_first: the fused projection of the source has all keys before all values
    weights each(lambda w: turned(w, LAYERS, 2), "source_kv.weight")
    in source_kv $DECODER.1.EncDecAttention.[kv]
linear_first: the converter fuses the linear half before the gate in decoder layer 1
    weights each(lambda w: w.roll(len(w) // 2, 0), "decoder.1.ff.wi.weight")
    in decoder.1.ff.wi decoder.block.1.layer.2.DenseReluDense.wi_[01]
norm_of_the_encoder: the decoder's last norm is the encoder's
    weights copy("decoder_norm.g", "encoder_norm.g")
    in decoder_norm decoder.final_layer_norm
"""
PORTS = (written(globals(), "text-to-text", "TextToText", file="text_to_text", length=SOURCE + 8),)
