"""T5 with fused projections, which prepares the source for all decoder layers at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import transformers

from ports.entry import DECODE, Bug, Logits, Model, State, spread
from ports.written import each, written

LAYERS, SOURCE = 3, 13  # the other ids are the target
ENCODER, DECODER = "encoder.block.*.layer", "decoder.block.*.layer"
SELF = (
    "encoder.*.attn",
    "decoder.*.attn",
    f"{ENCODER}.0.SelfAttention",
    f"{DECODER}.0.SelfAttention",
)
DENSE = (
    "encoder.*.ff",
    "decoder.*.ff",
    f"{ENCODER}.1.DenseReluDense",
    f"{DECODER}.2.DenseReluDense",
)
FIRST = "block.0.layer.0.SelfAttention"


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=512,
        d_model=64,
        d_kv=12,
        d_ff=96,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_heads=4,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=20,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                wide = "relative" in name or name == "shared.weight"
                parameter.normal_(0, 1 if wide else 0.12)
    return spread(model, seed)


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
    """Encode the source, decode all of the target but three tokens at once, then one by one."""
    source, target = ids[:, :SOURCE], ids[:, SOURCE:]
    prompt = target.shape[1] - DECODE
    out = model(input_ids=source, decoder_input_ids=target[:, :prompt], use_cache=True)
    logits, encoded = [out.logits], (out.encoder_last_hidden_state,)
    for token in target[:, prompt:].split(1, dim=1):
        out = model(
            encoder_outputs=encoded,
            decoder_input_ids=token,
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        logits.append(out.logits)
    return logits


def work(model: Model, ids: torch.Tensor) -> Logits:
    code = sys.modules[type(model).__module__]
    source, target = ids[:, :SOURCE], ids[:, SOURCE:]
    return list(code.run(model, source, target, target.shape[1] - DECODE))


def copied(to: str, of: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[to] = state[of].clone()

    return change


def kinds_first(weight: torch.Tensor) -> torch.Tensor:
    """Return the keys of all layers, then the values, where layers should come first."""
    return weight.unflatten(0, (LAYERS, 2, -1)).transpose(0, 1).flatten(0, 2)


def halves_swapped(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(len(weight) // 2, dims=0)


CROSS = ("decoder.*.cross", f"{DECODER}.1.EncDecAttention")
BUGS = (
    Bug(
        "scaled",
        "scores of self-attention are scaled, as T5's are not",
        old='        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)\n',
        new='        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5\n',
        modules=SELF,
    ),
    Bug(
        "looks_both_ways",
        "the decoder's distances have buckets for both directions",
        old="DistanceBias(cfg, both_ways=False)",
        new="DistanceBias(cfg, both_ways=True)",
        modules=("decoder_bias", f"decoder.{FIRST}", f"decoder.{FIRST}.relative_attention_bias"),
        early=True,
    ),
    Bug(
        "bias_of_the_first_alone",
        "the first encoder layer alone gets the bias",
        old="            x = layer(x, bias)\n",
        new="            x, bias = layer(x, bias), torch.zeros(())\n",
        modules=("", "encoder.*.attn", f"{ENCODER}.0.SelfAttention"),
        also=("scores = scores + bias",),
    ),
    Bug(
        "head_scaled",
        "the head is scaled as that of version 1.0",
        old="return self.head(x)",
        new="return self.head(x * x.shape[-1] ** -0.5)",
        modules=("", "head", "lm_head"),
    ),
    Bug(
        "gate_from_linear",
        "the activation is applied to the linear half",
        old="gate, linear = self.wi(x).chunk(2, dim=-1)",
        new="linear, gate = self.wi(x).chunk(2, dim=-1)",
        modules=DENSE,
        also=("return self.wo(F.gelu(",),
    ),
    Bug(
        "direction_swapped",
        "keys before the query get the buckets of those behind it",
        old="first = buckets if distance > 0 else 0",
        new="first = buckets if distance < 0 else 0",
        modules=("encoder_bias", f"encoder.{FIRST}", f"encoder.{FIRST}.relative_attention_bias"),
        also=("return self.table[:, torch.tensor(places)]",),
    ),
    Bug(
        "source_not_normed",
        "the decoder looks at the source before its last norm",
        old="        x = self.encoder_norm(x)\n",
        new="",
        modules=("", "encoder.final_layer_norm", "source_kv"),
        golden=("encoder.final_layer_norm*",),
        also=("kv = self.source_kv(x)",),
    ),
    Bug(
        "cross_not_normed",
        "cross-attention takes its queries from before the norm",
        old="x + self.cross(self.cross_norm(x), keys, values)",
        new="x + self.cross(x, keys, values)",
        modules=("decoder.*", f"{DECODER}.1.layer_norm", f"{DECODER}.1"),
        golden=(f"{DECODER}.1.layer_norm*",),
    ),
    Bug(
        "decoding_from_zero",
        "while decoding, distances are those of the first place",
        old="bias = self.decoder_bias(start, new, end)",
        new="bias = self.decoder_bias(0, new, end)",
        modules=("", "decoder_bias", f"decoder.{FIRST}"),
        also=("return self.table[:, torch.tensor(places)]",),
    ),
    Bug(
        "sees_one_ahead",
        "the decoder's mask lets the next token through",
        old=".triu(start + 1)",
        new=".triu(start + 2)",
        modules=("", "decoder", "decoder.*.attn", f"{DECODER}.0.SelfAttention"),
        also=("bias = bias.masked_fill(ahead",),
    ),
    Bug(
        "one_bias",
        "the converter loads the encoder's bias for the decoder",
        convert=copied("decoder_bias.table", "encoder_bias.table"),
        modules=("decoder_bias", f"decoder.{FIRST}", f"decoder.{FIRST}.relative_attention_bias"),
    ),
    Bug(
        "kinds_first",
        "the fused projection of the source has all keys before all values",
        convert=each(kinds_first, "source_kv.weight"),
        modules=("source_kv", f"{DECODER}.1.EncDecAttention.[kv]"),
    ),
    Bug(
        "linear_first",
        "the converter fuses the linear half before the gate in decoder layer 1",
        convert=each(halves_swapped, "decoder.1.ff.wi.weight"),
        modules=("decoder.1.ff.wi", "decoder.block.1.layer.2.DenseReluDense.wi_[01]"),
    ),
    Bug(
        "norm_of_the_encoder",
        "the decoder's last norm is the encoder's",
        convert=copied("decoder_norm.g", "encoder_norm.g"),
        modules=("decoder_norm", "decoder.final_layer_norm"),
    ),
)
PORTS = (
    replace(
        written("text-to-text", "TextToText", "T5", {}, BUGS, file="text_to_text", norms=norms),
        original=original,
        golden_work=golden_work,
        work=work,
        length=SOURCE + 8,
    ),
)
