"""DeBERTa-v2 for one text, time first, with one input projection, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import transformers

from ports.entry import Bug, Logits, Model, State, spread
from ports.written import written


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.DebertaV2Config(
        vocab_size=384,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        max_relative_positions=32,
        relative_attention=True,
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
        conv_kernel_size=3,
        conv_act="gelu",
        tie_word_embeddings=False,
    )
    model = transformers.DebertaV2ForMaskedLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5 if "embeddings" in name else 0.15)
    return spread(model, seed)


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the head's norm: the outputs of the others are residuals too, or shared."""
    yield hf.cls.predictions.transform.LayerNorm, [hf.cls.predictions.decoder]


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(ids).logits]


def key_bias_dropped(state: State) -> None:
    bias = state["layers.1.attn.in_proj_bias"]
    third = len(bias) // 3
    bias[third : 2 * third] = 0


ENCODER = "deberta.encoder"
ATTENTION = ("layers.*.attn", f"{ENCODER}.layer.*.attention.self")
BUGS = (
    Bug(
        "scale_of_bert",
        "scores are divided by the root of the head's width, not of three times it",
        old="math.sqrt(3 * self.dim)",
        new="math.sqrt(self.dim)",
        modules=ATTENTION,
    ),
    Bug(
        "distance_backwards",
        "the scores of positions and contents are looked up with the distance the other way",
        old="rel_q, k).gather(1, index)",
        new="rel_q, k).gather(1, index.mT)",
        modules=ATTENTION,
    ),
    Bug(
        "distances_not_normed",
        "the embeddings of distances are not normalised",
        old="rel = self.distances_norm(self.distances)",
        new="rel = self.distances",
        modules=("", "distances_norm", f"{ENCODER}.LayerNorm"),
        golden=(f"{ENCODER}.LayerNorm", f"{ENCODER}.LayerNorm/*.*"),
        also=("both = F.linear(rel",),
    ),
    Bug(
        "buckets_rounded_down",
        "the buckets of far distances are rounded down, not up",
        old="torch.ceil(steps)",
        new="torch.floor(steps)",
        modules=("", ENCODER, *ATTENTION),
        also=("rel_k).gather(2, index)", "rel_q, k).gather(1, index)"),
    ),
    Bug(
        "convolution_of_the_layer",
        "the convolution takes the output of the first layer, not its input",
        old="x = self.conv(embedded, x)",
        new="x = self.conv(x, x)",
        modules=("", "conv", ENCODER, f"{ENCODER}.conv", f"{ENCODER}.conv.conv"),
    ),
    Bug(
        "key_bias_dropped",
        "the fused bias of layer 1 has zeros for the keys",
        convert=key_bias_dropped,
        modules=("layers.1.attn", f"{ENCODER}.layer.1.attention.self.key_proj"),
    ),
)
PORTS = (
    replace(
        written("disentangled", "Disentangled", "DebertaV2", {}, BUGS, norms=norms, length=24),
        original=original,
        golden_work=golden_work,
    ),
)
