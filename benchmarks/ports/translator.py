"""BART with time first and keys of the source computed once, against Hugging Face's."""

from __future__ import annotations

from functools import partial

from ports import time_first
from ports.made import written
from ports.weights import Model, State, hugging_face, renamed

SOURCE = 13  # so many ids are the source, the others the target
ENCODER, DECODER = "model.encoder.layers.*", "model.decoder.layers.*"
SETTINGS = {
    "vocab_size": 384, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "max_position_embeddings": 64, "scale_embedding": True,
    "init_std": 0.15, "attn_implementation": "sdpa",
}  # fmt: skip
original = hugging_face(
    "BartForConditionalGeneration",
    SETTINGS,
    change=lambda model: model.final_logits_bias.normal_(0, 0.3),
)
norms = time_first.norms
golden_work = partial(time_first.golden_work, length=SOURCE)
work = partial(time_first.work, length=SOURCE)
NAMES = {
    "words": "model.shared",
    "{source,target}_places.table": "model.{encoder,decoder}.embed_positions",
    "{source,target}_places.norm": "model.{encoder,decoder}.layernorm_embedding",
    "*.*.attn.qkv": "model.*.layers.*.self_attn.{q,k,v}_proj",
    "*.*.attn.out": "model.*.layers.*.self_attn.out_proj",
    "*.*.{attn,cross,ffn}_norm": "model.*.layers.*.{self_attn,encoder_attn,final}_layer_norm",
    "*.*.cross.{q,out}": "model.*.layers.*.encoder_attn.{q,out}_proj",
    "*.*.cross.kv": "model.*.layers.*.encoder_attn.{k,v}_proj",
    "*.*.ffn.{up,down}": "model.*.layers.*.{fc1,fc2}",
}


def convert(hf: Model) -> State:
    return renamed(hf.state_dict(), NAMES) | {"bias": hf.final_logits_bias[0]}


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
    weights each(lambda b: reordered(b, (1, 2, 0)), "*.*.attn.qkv.bias")
    in encoder.*.attn.qkv decoder.*.attn.qkv $ENCODER.self_attn.[qkv]_proj
    in $DECODER.self_attn.[qkv]_proj
decoding_from_zero: while decoding, each token has the first place
    - self.target_places(self.embed(ids), start)
    + self.target_places(self.embed(ids))
    in (root) target_places target_places.table model.decoder model.decoder.embed_positions
    also places = torch.arange(
    also self.norm(x + self.table(
"""
PORTS = (written(globals(), "translator", "Translator", length=SOURCE + 10),)
