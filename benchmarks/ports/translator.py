"""BART with time first and keys of the source computed once, against Hugging Face's."""

from __future__ import annotations

import torch

from ports.bugs import bugs
from ports.entry import Logits
from ports.steps import run, translate
from ports.time_first import norms
from ports.weights import Model, hugging_face
from ports.written import written

SOURCE, PADDING, PAD = 13, 3, 1  # the other ids are the target
ENCODER, DECODER = "model.encoder.layers.*", "model.decoder.layers.*"
SETTINGS = {
    "vocab_size": 384,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "scale_embedding": True,
    "init_std": 0.15,
    "attn_implementation": "sdpa",
}


def texts(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the source, which ends in padding, and the target."""
    source = ids[:, :SOURCE].clone()
    source[:, -PADDING:] = PAD
    return source, ids[:, SOURCE:]


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    source, target = texts(ids)
    return translate(model, source, target, (source != PAD).long())


def as_listed(bias: torch.Tensor) -> torch.Tensor:
    """Join the bias as keys, values, queries: so the checkpoint lists them."""
    q, k, v = bias.chunk(3)
    return torch.cat((k, v, q))


BUGS = r"""
places_without_offset: places are looked up without the offset of two
    - self.table(places + OFFSET)
    + self.table(places)
    in *_places *_places.table model.encoder.embed_positions model.decoder.embed_positions
words_not_scaled: the embeddings of words are not scaled
    - return self.words(ids) * self.scale
    + return self.words(ids)
    in (root) words model.encoder.embed_tokens model.decoder.embed_tokens
    golden model.encoder.embed_tokens/Tensor.mul model.decoder.embed_tokens/Tensor.mul
padding_seen: the decoder looks at the padding of the source
    - self.cross(x, k, v, memory.padding)
    + self.cross(x, k, v, None)
    in decoder.* decoder.*.cross $DECODER.encoder_attn
    also return torch.bmm(scores.softmax(dim=-1), v)
query_bias_not_scaled: queries of the source are scaled before their bias is added
    - self.q(x) * self.scale
    + self.q(x * self.scale)
    in decoder.*.cross $DECODER.encoder_attn
biases_as_listed: the converter joins the biases of self-attention as keys, values, queries
    weights each(as_listed, "*.*.attn.qkv.bias")
    in encoder.*.attn.qkv decoder.*.attn.qkv $ENCODER.self_attn.[qkv]_proj
    in $DECODER.self_attn.[qkv]_proj
decoding_from_zero: while decoding, each token has the first place
    - self.target_places(self.embed(ids), start)
    + self.target_places(self.embed(ids))
    in (root) target_places target_places.table model.decoder model.decoder.embed_positions
    also places = torch.arange(
    also self.norm(x + self.table(
"""
PORTS = (
    written(
        "translator",
        "Translator",
        hugging_face(
            "BartForConditionalGeneration",
            SETTINGS,
            change=lambda model: model.final_logits_bias.normal_(0, 0.3),
        ),
        bugs(BUGS, globals()),
        golden_work=golden_work,
        work=lambda model, ids: run(model, *texts(ids)),
        norms=norms,
        length=SOURCE + 10,
    ),
)
