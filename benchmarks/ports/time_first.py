"""BART with time first and heads in the batch, against Hugging Face's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import transformers

from ports.entry import DECODE, Bug, Logits, Model, State, spread
from ports.written import each, swap, written

LAYERS, HEADS, SOURCE, PADDING, PAD = 3, 4, 12, 3, 1
ENCODER, DECODER = "model.encoder.layers.*", "model.decoder.layers.*"


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.BartConfig(
        vocab_size=512,
        d_model=64,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=48,
        pad_token_id=PAD,
        attn_implementation="sdpa",
    )
    model = transformers.BartForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.5 if "embed" in name or "shared" in name else 0.2)
    return spread(model, seed)


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the encoder's last norm: the outputs of the others are residuals too."""
    takers = [layer.encoder_attn for layer in hf.model.decoder.layers]
    last = hf.model.encoder.layers[-1].final_layer_norm
    yield last, [linear for a in takers for linear in (a.k_proj, a.v_proj)]


def halves(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the source, whose last tokens are padding, and the target."""
    source = ids[:, :SOURCE].clone()
    source[:, -PADDING:] = PAD
    return source, ids[:, SOURCE:]


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    source, target = halves(ids)
    prompt, visible = target.shape[1] - DECODE, source.ne(PAD).long()
    out = model(source, visible, decoder_input_ids=target[:, :prompt], use_cache=True)
    logits, encoded = [out.logits], (out.encoder_last_hidden_state,)
    for token in target[:, prompt:].split(1, dim=1):
        out = model(
            attention_mask=visible,
            encoder_outputs=encoded,
            decoder_input_ids=token,
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        logits.append(out.logits)
    return logits


def work(model: Model, ids: torch.Tensor) -> Logits:
    code = sys.modules[type(model).__module__]
    source, target = halves(ids)
    return list(code.run(model, source, target, target.shape[1] - DECODE))


def heads_inside(weight: torch.Tensor) -> torch.Tensor:
    return weight.unflatten(0, (-1, HEADS)).transpose(0, 1).flatten(0, 1)


def one_table(state: State) -> None:
    state["decoder_places.weight"] = state["encoder_places.weight"].clone()


def norms_swapped(state: State) -> None:
    for kind in ("weight", "bias"):
        swap(f"decoder.1.attn_norm.{kind}", f"decoder.1.cross_norm.{kind}")(state)


def copied(to: str, of: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[to] = state[of].clone()

    return change


ATTENTIONS = (
    "encoder.*.self_attn",
    "decoder.*.*_attn",
    f"{ENCODER}.self_attn",
    f"{DECODER}.*_attn",
)
OWN = ("decoder.*.self_attn", f"{DECODER}.self_attn")
CROSS = ("decoder.*.cross_attn", f"{DECODER}.encoder_attn")
BUGS = (
    Bug(
        "first_place_of_padding",
        "positions begin at the row of padding",
        old="first = start + PAD + 1",
        new="first = start + PAD",
        modules=("*coder_places", "model.*coder.embed_positions"),
        also=("return self.weight[first",),
    ),
    Bug(
        "places_from_zero",
        "while decoding, each token has the first place",
        old="self.decoder_places(start, new)",
        new="self.decoder_places(0, new)",
        modules=("", "decoder_places", "model.decoder.embed_positions"),
    ),
    Bug(
        "batch_mixed",
        "places are put in front before the heads are taken apart",
        old="return x.contiguous().view(time, batch * self.heads, self.head_dim).transpose(0, 1)",
        new="return x.contiguous().view(batch * self.heads, time, self.head_dim)",
        modules=ATTENTIONS,
    ),
    Bug(
        "bias_not_scaled",
        "queries are scaled before they are projected, so that their bias is not",
        old="self.split(self.q_proj(query) * self.scaling)",
        new="self.split(self.q_proj(query * self.scaling))",
        modules=(*ATTENTIONS, f"{ENCODER}.self_attn.q_proj", f"{DECODER}.*_attn.q_proj"),
    ),
    Bug(
        "padding_seen",
        "the decoder sees the source's padding",
        old='self.cross_attn(x, encoded, padding=padding, state=states["cross"])',
        new='self.cross_attn(x, encoded, state=states["cross"])',
        modules=("decoder.*", *CROSS),
        also=("out = torch.bmm(F.softmax(scores",),
    ),
    Bug(
        "steps_not_kept",
        "what decode steps add to the cache is forgotten",
        old="            if state is not None:",
        new="            if state == {}:",
        modules=OWN,
        also=("k = torch.cat([state", "v = torch.cat([state"),
    ),
    Bug(
        "values_not_kept",
        "the newest kept value is that of the first token",
        old="state.update(k=k, v=v)",
        new='state.update(k=k, v=torch.cat([state["v"], state["v"][:, :1]], 1) if state else v)',
        modules=OWN,
        also=('v = torch.cat([state["v"], v], dim=1)',),
    ),
    Bug(
        "norm_before",
        "the encoder's attention is normalised before the addition",
        old="x = self.attn_norm(x + self.self_attn(x, x, padding))",
        new="x = x + self.attn_norm(self.self_attn(x, x, padding))",
        modules=("encoder.*", "encoder.*.attn_norm", ENCODER, f"{ENCODER}.self_attn_layer_norm"),
    ),
    Bug(
        "relu",
        "the encoder's activation is ReLU, as the first Transformer's",
        old="        x = self.attn_norm(x + self.self_attn(x, x, padding))\n"
        "        return self.norm(x + self.fc2(F.gelu(self.fc1(x))))",
        new="        x = self.attn_norm(x + self.self_attn(x, x, padding))\n"
        "        return self.norm(x + self.fc2(F.relu(self.fc1(x))))",
        modules=("encoder.*", f"{ENCODER}.activation_fn", ENCODER),
    ),
    Bug(
        "embedding_scaled",
        "the source's embeddings are scaled",
        old="self.embed(source.T) + self",
        new="self.embed(source.T) * 8 + self",
        modules=("", "embed", "model.encoder", "model.encoder.embed_tokens", "model.shared"),
    ),
    Bug(
        "future_seen",
        "the decoder sees one token ahead",
        old=".triu(1)",
        new=".triu(2)",
        modules=("", *OWN, "model.decoder"),
        also=("scores = scores + future",),
    ),
    Bug(
        "one_table",
        "both sides have the encoder's positions",
        convert=one_table,
        modules=("decoder_places", "model.decoder.embed_positions"),
    ),
    Bug(
        "heads_inside",
        "the value rows of decoder layer 1 are ordered by channel, then head",
        convert=each(
            heads_inside, "decoder.1.self_attn.v_proj.weight", "decoder.1.self_attn.v_proj.bias"
        ),
        modules=("decoder.1.self_attn.v_proj", "model.decoder.layers.1.self_attn.v_proj"),
    ),
    Bug(
        "norms_swapped",
        "two norms of decoder layer 1 are swapped",
        convert=norms_swapped,
        modules=(
            "decoder.1.attn_norm",
            "decoder.1.cross_norm",
            "model.decoder.layers.1.*_attn_layer_norm",
        ),
    ),
    Bug(
        "cross_of_the_layer_before",
        "layer 2 looks at the source with layer 1's keys",
        convert=copied("decoder.2.cross_attn.k_proj.weight", "decoder.1.cross_attn.k_proj.weight"),
        modules=("decoder.2.cross_attn.k_proj", "model.decoder.layers.2.encoder_attn.k_proj"),
    ),
)
PORTS = (
    replace(
        written("time-first", "TimeFirst", "Bart", {}, BUGS, file="time_first", norms=norms),
        original=original,
        golden_work=golden_work,
        work=work,
        length=SOURCE + 9,
    ),
)
