"""BART with time first and keys of the source computed once, against Hugging Face's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
import transformers

from ports.entry import DECODE, Bug, Logits, Model, State, spread
from ports.written import written

SOURCE, PADDING, PAD = 13, 3, 1  # the other ids are the target
ENCODER, DECODER = "model.encoder.layers.*", "model.decoder.layers.*"


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.BartConfig(
        vocab_size=384,
        d_model=48,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=64,
        scale_embedding=True,
        init_std=0.15,
        attn_implementation="sdpa",
    )
    model = transformers.BartForConditionalGeneration(config)
    with torch.no_grad():
        model.final_logits_bias.normal_(0, 0.3)
    return spread(model, seed)


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the encoder's last norm: what the others give is summed, or is for the embedding."""
    cross = [layer.encoder_attn for layer in hf.model.decoder.layers]
    last = hf.model.encoder.layers[-1].final_layer_norm
    yield last, [x for a in cross for x in (a.k_proj, a.v_proj)]


def texts(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the source, which ends in padding, the target, and how much of it is the prompt."""
    source, target = ids[:, :SOURCE].clone(), ids[:, SOURCE:]
    source[:, -PADDING:] = PAD
    return source, target, target.shape[1] - DECODE


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    """Encode the source, decode all of the target but three tokens at once, then one by one."""
    source, target, prompt = texts(ids)
    given = {"attention_mask": (source != PAD).long(), "use_cache": True}
    out = model(input_ids=source, decoder_input_ids=target[:, :prompt], **given)
    logits, encoded = [out.logits], (out.encoder_last_hidden_state,)
    for token in target[:, prompt:].split(1, dim=1):
        cache = out.past_key_values
        out = model(
            encoder_outputs=encoded, decoder_input_ids=token, past_key_values=cache, **given
        )
        logits.append(out.logits)
    return logits


def work(model: Model, ids: torch.Tensor) -> Logits:
    code = sys.modules[type(model).__module__]
    return list(code.run(model, *texts(ids)))


def biases_as_listed(state: State) -> None:
    """Join the biases of self-attention as keys, values, queries: so the checkpoint lists them."""
    for name in state:
        if name.endswith("attn.qkv.bias"):
            q, k, v = state[name].chunk(3)
            state[name] = torch.cat((k, v, q))


BUGS = (
    Bug(
        "places_without_offset",
        "places are looked up without the offset of two",
        old="self.table(places + OFFSET)",
        new="self.table(places)",
        modules=(
            "*_places",
            "*_places.table",
            "model.encoder.embed_positions",
            "model.decoder.embed_positions",
        ),
    ),
    Bug(
        "words_not_scaled",
        "the embeddings of words are not scaled",
        old="return self.words(ids) * self.scale",
        new="return self.words(ids)",
        modules=("", "words", "model.encoder.embed_tokens", "model.decoder.embed_tokens"),
        golden=(
            "model.encoder.embed_tokens/Tensor.mul",
            "model.decoder.embed_tokens/Tensor.mul",
        ),
    ),
    Bug(
        "padding_seen",
        "the decoder looks at the padding of the source",
        old="self.cross(x, k, v, memory.padding)",
        new="self.cross(x, k, v, None)",
        modules=("decoder.*", "decoder.*.cross", f"{DECODER}.encoder_attn"),
        also=("return torch.bmm(scores.softmax(dim=-1), v)",),
    ),
    Bug(
        "query_bias_not_scaled",
        "queries of the source are scaled before their bias is added",
        old="self.q(x) * self.scale",
        new="self.q(x * self.scale)",
        modules=("decoder.*.cross", f"{DECODER}.encoder_attn"),
    ),
    Bug(
        "biases_as_listed",
        "the converter joins the biases of self-attention as keys, values, queries",
        convert=biases_as_listed,
        modules=(
            "encoder.*.attn.qkv",
            "decoder.*.attn.qkv",
            f"{ENCODER}.self_attn.[qkv]_proj",
            f"{DECODER}.self_attn.[qkv]_proj",
        ),
    ),
    Bug(
        "decoding_from_zero",
        "while decoding, each token has the first place",
        old="self.target_places(self.embed(ids), start)",
        new="self.target_places(self.embed(ids))",
        modules=(
            "",
            "target_places",
            "target_places.table",
            "model.decoder",
            "model.decoder.embed_positions",
        ),
        also=("places = torch.arange(", "self.norm(x + self.table("),
    ),
)
PORTS = (
    replace(
        written("translator", "Translator", "Bart", {}, BUGS, norms=norms),
        original=original,
        golden_work=golden_work,
        work=work,
        length=SOURCE + 10,
    ),
)
