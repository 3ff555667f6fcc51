"""BART with time first and heads in the batch, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ports.entry import Logits
from ports.made import written
from ports.steps import run, translate
from ports.weights import Model, hugging_face

HEADS, SOURCE, PADDING, PAD = 4, 12, 3, 1
ENCODER, DECODER = "model.encoder.layers.*", "model.decoder.layers.*"
SETTINGS = {
    "vocab_size": 512, "d_model": 64, "encoder_layers": 3, "decoder_layers": 3,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "max_position_embeddings": 48, "pad_token_id": PAD,
    "attn_implementation": "sdpa",
}  # fmt: skip
original = hugging_face(
    "BartForConditionalGeneration", SETTINGS, 0.2, stds={"embed": 0.5, "shared": 0.5}
)
NAMES = {
    "embed": "model.shared",
    "*_places": "model.*.embed_positions",
    "*_norm": "model.*.layernorm_embedding",
    "*.*.{self_attn,cross_attn,fc1,fc2}": "model.*.layers.*.{self_attn,encoder_attn,fc1,fc2}",
    "*.*.{attn_norm,cross_norm,norm}": "model.*.layers.*.{self_attn,encoder_attn,final}_layer_norm",
}


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the encoder's last norm: the outputs of the others are residuals too."""
    takers = [layer.encoder_attn for layer in hf.model.decoder.layers]
    last = hf.model.encoder.layers[-1].final_layer_norm
    yield last, [linear for a in takers for linear in (a.k_proj, a.v_proj)]


def halves(ids: torch.Tensor, length: int = SOURCE) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the source, whose last tokens are padding, and the target."""
    source = ids[:, :length].clone()
    source[:, -PADDING:] = PAD
    return source, ids[:, length:]


def golden_work(model: Model, ids: torch.Tensor, length: int = SOURCE) -> Logits:
    source, target = halves(ids, length)
    return translate(model, source, target, source.ne(PAD).long())


def work(model: Model, ids: torch.Tensor, length: int = SOURCE) -> Logits:
    return run(model, *halves(ids, length))


OWN = ("decoder.*.self_attn", f"{DECODER}.self_attn")
CROSS = ("decoder.*.cross_attn", f"{DECODER}.encoder_attn")
OURS = ("encoder.*.self_attn", "decoder.*.*_attn")
ATTENTIONS = (*OURS, f"{ENCODER}.self_attn", f"{DECODER}.*_attn")
BUGS = r"""
first_place_of_padding: positions begin at the row of padding
    - first = start + PAD + 1
    + first = start + PAD
    in *coder_places model.*coder.embed_positions
    also return self.weight[first
places_from_zero: while decoding, each token has the first place
    - self.decoder_places(start, new)
    + self.decoder_places(0, new)
    in (root) decoder_places model.decoder.embed_positions
batch_mixed: places are put in front before the heads are taken apart
    - return x.contiguous().view(time, batch * self.heads, self.head_dim).transpose(0, 1)
    + return x.contiguous().view(batch * self.heads, time, self.head_dim)
    in $ATTENTIONS
bias_not_scaled: queries are scaled before they are projected, so that their bias is not
    - self.split(self.q_proj(query) * self.scaling)
    + self.split(self.q_proj(query * self.scaling))
    in $ATTENTIONS $ENCODER.self_attn.q_proj $DECODER.*_attn.q_proj
padding_seen: the decoder sees the source's padding
    - self.cross_attn(x, encoded, padding=padding, state=states["cross"])
    + self.cross_attn(x, encoded, state=states["cross"])
    in decoder.* $CROSS
    also out = torch.bmm(F.softmax(scores
steps_not_kept: what decode steps add to the cache is forgotten
    -             if state is not None:
    +             if state == {}:
    in $OWN
    also k = torch.cat([state
    also v = torch.cat([state
values_not_kept: the newest kept value is that of the first token
    - state.update(k=k, v=v)
    + state.update(k=k, v=torch.cat([state["v"], state["v"][:, :1]], 1) if state else v)
    in $OWN
    also v = torch.cat([state["v"], v], dim=1)
norm_before: the encoder's attention is normalised before the addition
    - x = self.attn_norm(x + self.self_attn(x, x, padding))
    + x = x + self.attn_norm(self.self_attn(x, x, padding))
    in encoder.* encoder.*.attn_norm $ENCODER $ENCODER.self_attn_layer_norm
relu: the encoder's activation is ReLU, as the first Transformer's
    -         x = self.attn_norm(x + self.self_attn(x, x, padding))
    -         return self.norm(x + self.fc2(F.gelu(self.fc1(x))))
    +         x = self.attn_norm(x + self.self_attn(x, x, padding))
    +         return self.norm(x + self.fc2(F.relu(self.fc1(x))))
    in encoder.* $ENCODER.activation_fn $ENCODER
embedding_scaled: the source's embeddings are scaled
    - self.embed(source.T) + self
    + self.embed(source.T) * 8 + self
    in (root) embed model.encoder model.encoder.embed_tokens model.shared
future_seen: the decoder sees one token ahead
    - .triu(1)
    + .triu(2)
    in (root) $OWN model.decoder
    also scores = scores + future
one_table: both sides have the encoder's positions
    weights copy("decoder_places", "encoder_places")
    in decoder_places model.decoder.embed_positions
heads_inside: the value rows of decoder layer 1 are ordered by channel, then head
    weights each(lambda w: turned(w, 16, HEADS), "decoder.1.self_attn.v_proj")
    in decoder.1.self_attn.v_proj model.decoder.layers.1.self_attn.v_proj
norms_swapped: two norms of decoder layer 1 are swapped
    weights swap("decoder.1.attn_norm", "decoder.1.cross_norm")
    in decoder.1.attn_norm decoder.1.cross_norm model.decoder.layers.1.*_attn_layer_norm
cross_of_the_layer_before: layer 2 looks at the source with layer 1's keys
    weights copy("decoder.2.cross_attn.k_proj.weight", "decoder.1.cross_attn.k_proj.weight")
    in decoder.2.cross_attn.k_proj model.decoder.layers.2.encoder_attn.k_proj
"""
PORTS = (written(globals(), "time-first", "TimeFirst", file="time_first", length=SOURCE + 9),)
