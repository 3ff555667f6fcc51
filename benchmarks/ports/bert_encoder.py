"""BERT made of PyTorch's own encoder layers against that of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import transformers

from ports.code.torch_bert import weights
from ports.entry import Bug, Logits, Model, Port, State, spread
from ports.written import CODE

WIDTH, HEADS, LAYERS, VOCABULARY = 64, 4, 3, 512
PADDING = 3  # so many last tokens
BLOCK, LAYER = "encoder.layers.*", "bert.encoder.layer.*"


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=64,
        initializer_range=0.12,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return spread(transformers.BertForMaskedLM(config), seed)


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norm of the head: the outputs of the others are residuals too."""
    yield hf.cls.predictions.transform.LayerNorm, [hf.cls.predictions.decoder]


def inputs(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, segments, and which tokens are none for padding, each [1, length]."""
    segments, visible = torch.zeros_like(ids), torch.ones_like(ids)
    segments[:, ids.shape[1] // 2 :] = 1
    visible[:, -PADDING:] = 0
    return ids, segments, visible


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    ids, segments, visible = inputs(ids)
    out = model(ids, token_type_ids=segments, attention_mask=visible)
    return [out.logits[:, :-PADDING]]


def work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(*inputs(ids))[:, :-PADDING]]


def make(code: ModuleType, hf: Model, **settings: Any) -> Model:
    return code.Encoder(hf.config, **settings)


# -- changes of weights --------------------------------------------------------------------------


def in_proj(order: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    """Return what puts the rows of the fused q, k and v of each layer in another order."""

    def change(state: State) -> None:
        for n in range(LAYERS):
            for kind in ("weight", "bias"):
                name = f"encoder.layers.{n}.self_attn.in_proj_{kind}"
                state[name] = state[name][order(torch.arange(3 * WIDTH))]

    return change


def q_last(n: torch.Tensor) -> torch.Tensor:
    q, k, v = n.chunk(3)
    return torch.cat([k, v, q])


def by_head(n: torch.Tensor) -> torch.Tensor:
    """Take q, k and v of one head after the other."""
    return n.view(3, HEADS, -1).transpose(0, 1).flatten()


def fused_bias_left(state: State) -> None:
    for n in range(LAYERS):
        state[f"encoder.layers.{n}.self_attn.in_proj_bias"].zero_()


def norms_swapped(state: State) -> None:
    for n in range(LAYERS):
        for kind in ("weight", "bias"):
            a, b = (f"encoder.layers.{n}.norm{i}.{kind}" for i in (1, 2))
            state[a], state[b] = state[b], state[a]


def layer_before(state: State) -> None:
    name = "encoder.layers.{}.linear2.weight"
    state[name.format(2)] = state[name.format(1)].clone()


def head_bias_left(state: State) -> None:
    state["head.bias"].zero_()


def head_tied(state: State) -> None:
    state["head.weight"] = state["embeddings.token.weight"].clone()


def not_transposed(state: State) -> None:
    state["transform.0.weight"] = state["transform.0.weight"].T.contiguous()


def segments_swapped(state: State) -> None:
    state["embeddings.segment"] = state["embeddings.segment"].flip(0)


# -- bugs ----------------------------------------------------------------------------------------

ATTENTION = (f"{BLOCK}.self_attn", f"{LAYER}.attention.self")  # the fused weight is its own
QKV = (*ATTENTION, *(f"{LAYER}.attention.self.{name}" for name in ("query", "key", "value")))
EMBEDDINGS = ("embeddings", "bert.embeddings")
BUGS = (
    Bug("q_last", "q is fused after k and v", convert=in_proj(q_last), modules=QKV),
    Bug("by_head", "q, k and v are fused head by head", convert=in_proj(by_head), modules=QKV),
    Bug(
        "fused_bias_left",
        "the fused bias is not loaded",
        convert=fused_bias_left,
        modules=QKV,
    ),
    Bug(
        "norms_swapped",
        "the norms of each layer are swapped",
        convert=norms_swapped,
        modules=(
            f"{BLOCK}.norm[12]",
            f"{LAYER}.attention.output.LayerNorm",
            f"{LAYER}.output.LayerNorm",
        ),
    ),
    Bug(
        "layer_off",
        "a weight is that of the layer before",
        convert=layer_before,
        modules=("encoder.layers.2.linear2", "bert.encoder.layer.2.output.dense"),
    ),
    Bug(
        "head_bias_left",
        "the bias of the head is not loaded",
        convert=head_bias_left,
        modules=("head", "cls.predictions.decoder"),
    ),
    Bug(
        "head_tied",
        "the head has the embedding's weight",
        convert=head_tied,
        modules=("head", "cls.predictions.decoder"),
    ),
    Bug(
        "transposed",
        "the linear layer of the head is transposed",
        convert=not_transposed,
        modules=("transform.0", "cls.predictions.transform.dense"),
    ),
    Bug(
        "segments_swapped",
        "the embeddings of the segments are swapped",
        convert=segments_swapped,
        modules=(*EMBEDDINGS, "bert.embeddings.token_type_embeddings"),
    ),
    Bug(
        "relu",
        "ReLU for GELU, as is PyTorch's default",
        settings={"activation": "relu"},
        modules=(BLOCK, f"{LAYER}.intermediate", f"{LAYER}.intermediate.intermediate_act_fn"),
    ),
    Bug(
        "norm_first",
        "norms come before, not after",
        settings={"first": True},
        modules=(
            BLOCK,
            LAYER,
            f"{LAYER}.attention",
            f"{LAYER}.attention.output",
            f"{LAYER}.output",
        ),
    ),
    Bug(
        "places_off",
        "positions begin at one",
        "x + self.place[: ids.shape[1]]",
        "x + self.place[1 : ids.shape[1] + 1]",
        modules=(*EMBEDDINGS, "bert.embeddings.position_embeddings"),
    ),
    Bug(
        "no_segments",
        "all tokens are of the first segment",
        "F.one_hot(segments, len(self.segment))",
        "F.one_hot(segments * 0, len(self.segment))",
        modules=(*EMBEDDINGS, "bert.embeddings.token_type_embeddings"),
    ),
    Bug(
        "mask_turned",
        "the tokens are masked, not the padding",
        "src_key_padding_mask=visible == 0",
        "src_key_padding_mask=visible == 1",
        modules=("", "bert", *ATTENTION),
    ),
    Bug(
        "no_mask",
        "the padding is not masked",
        "self.encoder(x, src_key_padding_mask=visible == 0)",
        "self.encoder(x)",
        modules=("", "bert", *ATTENTION),
    ),
)

PORTS = (
    Port(
        "torch-bert",
        CODE / "torch_bert.py",
        original,
        make,
        weights,
        golden_work,
        work,
        norms,
        BUGS,
    ),
)
