"""GPT-NeoX, MPT and Falcon of curated-transformers against those of Hugging Face."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from ports import packages
from ports.entry import DECODE, Bug, Logits, Model, Port, State, decode, spread

WIDTH, HEADS, LAYERS, VOCABULARY = 96, 6, 3, 512
HEAD = WIDTH // HEADS
BLOCK = "decoder.layers.*"
GROUPS = 2  # of Falcon
NEOX, MPT, FALCON = "gpt_neox.layers.*", "transformer.blocks.*", "transformer.h.*"


def scaled(model: Model, seed: int) -> Model:
    """Give a model's weights the scale of trained ones: its own initialisation is far below it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.12)
    return spread(model, seed)


def neox(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=128,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return scaled(transformers.GPTNeoXForCausalLM(config), seed)


def mpt(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.MptConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, max_seq_len=64
    )
    return scaled(transformers.MptForCausalLM(config), seed)


def falcon(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_kv_heads=GROUPS,
        new_decoder_architecture=True,
        bias=False,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return scaled(transformers.FalconForCausalLM(config), seed)


def neox_norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    for layer in hf.gpt_neox.layers:
        yield layer.input_layernorm, [layer.attention.query_key_value]
        yield layer.post_attention_layernorm, [layer.mlp.dense_h_to_4h]
    yield hf.gpt_neox.final_layer_norm, [hf.lm_head]


def mpt_norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms but the last one: what takes its output is the embedding too."""
    for layer in hf.transformer.blocks:
        yield layer.norm_1, [layer.attn.Wqkv]
        yield layer.norm_2, [layer.ffn.up_proj]


def falcon_norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    for layer in hf.transformer.h:
        yield layer.ln_attn, [layer.self_attention.query_key_value]
        yield layer.ln_mlp, [layer.mlp.dense_h_to_4h]
    yield hf.transformer.ln_f, [hf.lm_head]


# -- the ports -----------------------------------------------------------------------------------

COMMON = (
    "layers/cache.py",
    "layers/activations.py",
    "layers/embeddings.py",
    "layers/attention.py",
    "layers/feedforward.py",
    "layers/transformer.py",
    "models/config.py",
    "models/output.py",
    "models/module.py",
    "models/transformer.py",
)
PARTS = ("config", "decoder", "causal_lm")
# base classes that load checkpoints
BEFORE = """from typing import Generic, TypeVar
class FromHF(Generic[TypeVar("ConfigT")]): ...
class Quantizable: ...
"""


def source(kind: str, *names: str) -> Path:
    own = (f"models/{kind}/{name}.py" for name in names)
    return packages.joined("curated_transformers", *COMMON, *own, before=BEFORE)


def make_falcon(code: ModuleType, hf: Model, **settings: Any) -> Model:
    given = {
        "hidden_width": WIDTH,
        "n_query_heads": HEADS,
        "n_key_value_heads": GROUPS,
        "n_hidden_layers": LAYERS,
        "n_pieces": VOCABULARY,
        "rotary_embedding_base": 10000,
        "rotary_embedding_fraction": 1.0,
        "new_decoder_architecture": True,
        "use_alibi": False,
        "use_bias": False,
        "use_parallel_attention": True,
    }
    return code.FalconCausalLM(code.FalconConfig(**{**given, **settings}))


def sizes(code: ModuleType, activation: str = "gelu", **settings: Any) -> dict[str, Any]:
    """Return what both configurations take."""
    given = {
        "activation": code.Activation(activation),
        "hidden_width": WIDTH,
        "n_attention_heads": HEADS,
        "n_hidden_layers": LAYERS,
        "n_pieces": VOCABULARY,
    }
    return {**given, **settings}


def make_neox(code: ModuleType, hf: Model, **settings: Any) -> Model:
    given = {"intermediate_width": 4 * WIDTH, "rotary_embedding_fraction": 0.5, **settings}
    return code.GPTNeoXCausalLM(code.GPTNeoXConfig(**sizes(code, **given)))


def make_mpt(code: ModuleType, hf: Model, **settings: Any) -> Model:
    given = {"intermediate_width_multiplier": 4, **settings}
    return code.MPTCausalLM(code.MPTConfig(**sizes(code, **given)))


NEOX_NAMES = {
    "decoder.embeddings.piece_embeddings": "gpt_neox.embed_in",
    "decoder.output_layer_norm": "gpt_neox.final_layer_norm",
    "output_embeddings": "lm_head",
    "mha.input": "attention.query_key_value",
    "mha.output": "attention.dense",
    "ffn.intermediate": "mlp.dense_h_to_4h",
    "ffn.output": "mlp.dense_4h_to_h",
    "attn_input_layer_norm": "input_layernorm",
    "ffn_input_layer_norm": "post_attention_layernorm",
}
MPT_NAMES = {
    "decoder.embeddings.piece_embeddings": "transformer.wte",
    "decoder.output_layer_norm": "transformer.norm_f",
    "mha.input": "attn.Wqkv",
    "mha.output": "attn.out_proj",
    "ffn.intermediate": "ffn.up_proj",
    "ffn.output": "ffn.down_proj",
    "attn_input_layer_norm": "norm_1",
    "ffn_input_layer_norm": "norm_2",
}

FALCON_NAMES = {
    "decoder.embeddings.piece_embeddings": "transformer.word_embeddings",
    "decoder.output_layer_norm": "transformer.ln_f",
    "output_embeddings": "lm_head",
    "mha.input": "self_attention.query_key_value",
    "mha.output": "self_attention.dense",
    "ffn.intermediate": "mlp.dense_h_to_4h",
    "ffn.output": "mlp.dense_4h_to_h",
    "attn_input_layer_norm": "ln_attn",
    "ffn_input_layer_norm": "ln_mlp",
}


def convert(hf: Model, names: dict[str, str], layers: str) -> State:
    """Return the weights under the names of curated-transformers. ``layers``: of the original."""
    given, state = hf.state_dict(), {}
    for ours, theirs in names.items():
        pairs = [(ours, theirs)]
        if ours.partition(".")[0] not in ("decoder", "output_embeddings"):
            pairs = [
                (f"decoder.layers.{n}.{ours}", f"{layers}.{n}.{theirs}") for n in range(LAYERS)
            ]
        for new, old in pairs:
            for kind in ("weight", "bias"):
                if f"{old}.{kind}" in given:
                    state[f"{new}.{kind}"] = given[f"{old}.{kind}"]
    return state


def prepare(model: Model, dtype: torch.dtype) -> None:
    """Give the tables of RoPE the dtype of the weights too."""
    model.to(dtype)


def work(model: Model, ids: torch.Tensor) -> Logits:
    """Prefill all but the last tokens, then feed them one by one with a mask of all so far."""
    code, cache = sys.modules[type(model).__module__], None
    logits, prompt = [], ids.shape[1] - DECODE
    for first, last in [(0, prompt), *((n, n + 1) for n in range(prompt, ids.shape[1]))]:
        mask = code.AttentionMask(torch.ones(1, last, dtype=torch.bool))
        out = model(ids[:, first:last], mask, cache=cache, store_cache=True)
        cache = out.cache
        logits.append(out.logits)
    return logits


# -- changes of weights --------------------------------------------------------------------------


def fused(order: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    """Return what puts the rows of the fused q, k and v of each layer in another order."""

    def change(state: State) -> None:
        for n in range(LAYERS):
            for kind in ("weight", "bias"):
                name = f"decoder.layers.{n}.mha.input.{kind}"
                if name in state:
                    state[name] = state[name][order(torch.arange(len(state[name])))]

    return change


def not_by_head(n: torch.Tensor) -> torch.Tensor:
    """Take all of q, then of k and v, where q, k and v of one head follow each other."""
    return n.view(HEADS, 3, HEAD).transpose(0, 1).flatten()


def by_head(n: torch.Tensor) -> torch.Tensor:
    return n.view(3, HEADS, HEAD).transpose(0, 1).flatten()


def v_before_k(n: torch.Tensor) -> torch.Tensor:
    q, k, v = n.chunk(3)
    return torch.cat([q, v, k])


def not_by_group(n: torch.Tensor) -> torch.Tensor:
    """Take all of q, then of k and v, where those of one group follow each other."""
    groups = n.view(GROUPS, HEADS // GROUPS + 2, HEAD)
    return torch.cat([groups[:, :-2].flatten(), groups[:, -2].flatten(), groups[:, -1].flatten()])


def v_groups(n: torch.Tensor) -> torch.Tensor:
    """Put the values of the groups in another order."""
    groups = n.view(GROUPS, HEADS // GROUPS + 2, HEAD).clone()
    groups[:, -1] = groups[:, -1].flip(0)
    return groups.flatten()


def one_norm(state: State) -> None:
    """Take the norm before attention for the feed-forward layer too, as small Falcons do."""
    for n in range(LAYERS):
        for kind in ("weight", "bias"):
            path = f"decoder.layers.{n}.{{}}_input_layer_norm.{kind}"
            state[path.format("ffn")] = state[path.format("attn")].clone()


def head_tied(state: State) -> None:
    state["output_embeddings.weight"] = state["decoder.embeddings.piece_embeddings.weight"].clone()


def norms_swapped(state: State) -> None:
    for n in range(LAYERS):
        for kind in ("weight", "bias"):
            a, b = (f"decoder.layers.{n}.{i}_input_layer_norm.{kind}" for i in ("attn", "ffn"))
            if a in state:
                state[a], state[b] = state[b], state[a]


def layer_before(name: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[f"decoder.layers.2.{name}"] = state[f"decoder.layers.1.{name}"].clone()

    return change


def bias_left(state: State) -> None:
    for n in range(LAYERS):
        state[f"decoder.layers.{n}.mha.output.bias"].zero_()


def last_norm_left(state: State) -> None:
    state["decoder.output_layer_norm.weight"].fill_(1)


def transposed(state: State) -> None:
    for n in range(LAYERS):
        name = f"decoder.layers.{n}.mha.output.weight"
        state[name] = state[name].T.contiguous()


# -- bugs ----------------------------------------------------------------------------------------

SCORER = f"{BLOCK}.mha.attention_scorer"
NEOX_ATTENTION = (f"{BLOCK}.mha", SCORER, f"{NEOX}.attention")
NEOX_NORMS = (
    f"{BLOCK}.attn_input_layer_norm",
    f"{BLOCK}.ffn_input_layer_norm",
    f"{NEOX}.input_layernorm",
    f"{NEOX}.post_attention_layernorm",
)
ROTARY = f"{BLOCK}.mha.rotary_embeds"
MASK = """torch.ones((key_len, key_len), device=query.device, dtype=torch.bool),
    )"""
NEOX_BUGS = (
    Bug(
        "not_by_head",
        "q, k and v are fused one after the other, not head by head",
        convert=fused(not_by_head),
        modules=(f"{BLOCK}.mha.input", f"{NEOX}.attention.query_key_value"),
    ),
    Bug("norms_swapped", "the norms are swapped", convert=norms_swapped, modules=NEOX_NORMS),
    Bug(
        "layer_off",
        "a weight is that of the layer before",
        convert=layer_before("ffn.output.weight"),
        modules=("decoder.layers.2.ffn.output", "gpt_neox.layers.2.mlp.dense_4h_to_h"),
    ),
    Bug(
        "bias_left",
        "the bias behind attention is not loaded",
        convert=bias_left,
        modules=(f"{BLOCK}.mha.output", f"{NEOX}.attention.dense"),
    ),
    Bug(
        "all_rotary",
        "RoPE turns all of each head",
        settings={"rotary_embedding_fraction": 1.0},
        modules=(ROTARY, f"{ROTARY}.rotary_embeds", f"{NEOX}.attention", "gpt_neox.rotary_emb"),
    ),
    Bug(
        "rope_base",
        "the base of RoPE is another one",
        settings={"rotary_embedding_base": 500},
        modules=(f"{ROTARY}.rotary_embeds", "gpt_neox.rotary_emb"),
    ),
    Bug(
        "silu",
        "SiLU for GELU",
        settings={"activation": "silu"},
        modules=(f"{BLOCK}.ffn.activation", f"{NEOX}.mlp.act"),
    ),
    Bug(
        "one_after_the_other",
        "the feed-forward layer takes the output of attention too",
        "ffn_in = input\n",
        "ffn_in = input + attn_out\n",
        modules=(BLOCK, NEOX),
    ),
    Bug(
        "attention_lost",
        "the output of attention is not added",
        "self.parallel_attn_dropout(attn_out + ffn_out)",
        "self.parallel_attn_dropout(ffn_out)",
        modules=(BLOCK, NEOX),
        golden=(f"{NEOX}/Tensor.add",),
    ),
    Bug(
        "rotate_sign",
        "RoPE turns the other way",
        "input_1 = -input[..., half_idx:]\n        input_2 = input[..., :half_idx]",
        "input_1 = input[..., half_idx:]\n        input_2 = -input[..., :half_idx]",
        modules=(f"{ROTARY}.rotary_embeds", f"{NEOX}.attention"),
    ),
    Bug(
        "mask_off",
        "the causal mask lets the next token through",
        MASK,
        MASK.replace("),\n", "),\n        diagonal=1,\n"),
        modules=("gpt_neox", *NEOX_ATTENTION),
    ),
    Bug(
        "position_off",
        "positions are one behind while decoding",
        "                cache_len,\n                cache_len + seq_len,",
        "                cache_len - 1,\n                cache_len + seq_len - 1,",
        modules=(ROTARY, f"{NEOX}.attention", "gpt_neox.rotary_emb"),
    ),
    Bug(
        "wrong_scale",
        "scores are scaled with the number of keys",
        "width = key.shape[-1]",
        "width = key.shape[-2]",
        modules=NEOX_ATTENTION,
        also=("attn_scores /= math.sqrt(width)",),
    ),
)

MPT_ATTENTION = (f"{BLOCK}.mha", SCORER, f"{MPT}.attn")
BIASES = f"{SCORER}.linear_biases"
BIASED = """            attn_scores /= math.sqrt(width)

            if self.linear_biases is not None:
                attn_scores = self.linear_biases(attention_scores=attn_scores)
"""
BIASED_FIRST = """            if self.linear_biases is not None:
                attn_scores = self.linear_biases(attention_scores=attn_scores)
            attn_scores /= math.sqrt(width)
"""
MPT_BUGS = (
    Bug(
        "by_head",
        "q, k and v are fused head by head",
        convert=fused(by_head),
        modules=(f"{BLOCK}.mha.input", f"{MPT}.attn.Wqkv"),
    ),
    Bug(
        "v_before_k",
        "keys and values are fused in the wrong order",
        convert=fused(v_before_k),
        modules=(f"{BLOCK}.mha.input", f"{MPT}.attn.Wqkv"),
    ),
    Bug(
        "transposed",
        "the output projection of attention is transposed",
        convert=transposed,
        modules=(f"{BLOCK}.mha.output", f"{MPT}.attn.out_proj"),
    ),
    Bug(
        "last_norm_left",
        "the last norm is not loaded",
        convert=last_norm_left,
        modules=("decoder.output_layer_norm", "transformer.norm_f"),
    ),
    Bug(
        "layer_off",
        "a weight is that of the layer before",
        convert=layer_before("mha.input.weight"),
        modules=("decoder.layers.2.mha.input", "transformer.blocks.2.attn.Wqkv"),
    ),
    Bug(
        "wrong_eps",
        "eps of the norms is too large",
        settings={"layer_norm_eps": 1e-2},
        modules=(
            f"{BLOCK}.*_input_layer_norm",
            "decoder.output_layer_norm",
            f"{MPT}.norm_[12]",
            "transformer.norm_f",
        ),
    ),
    Bug(
        "slopes",
        "the slopes of the heads beyond a power of two are others",
        "_slopes_with_step(2 * k, step=2)",
        "_slopes_with_step(2 * k)",
        modules=(BIASES, SCORER, f"{MPT}.attn", "transformer"),
        early=True,
    ),
    Bug(
        "no_biases",
        "tokens far away have no lower scores",
        "attn_scores = self.linear_biases(attention_scores=attn_scores)",
        "pass",
        modules=(SCORER, f"{BLOCK}.mha", f"{MPT}.attn"),
        golden=(f"{MPT}.attn/Tensor.add",),
    ),
    Bug(
        "biases_turned",
        "tokens far away have higher scores",
        "distances = torch.arange(1 - seq_len, 1)",
        "distances = torch.arange(0, -seq_len, -1)",
        modules=(BIASES, f"{MPT}.attn", "transformer"),
    ),
    Bug(
        "biases_scaled",
        "scores are scaled with their biases",
        BIASED,
        BIASED_FIRST,
        modules=MPT_ATTENTION,
    ),
    Bug(
        "cache_order",
        "new values are put before those of the cache",
        "torch.cat([cache_v, value], dim=-2)",
        "torch.cat([value, cache_v], dim=-2)",
        modules=(f"{BLOCK}.mha", f"{MPT}.attn"),
    ),
    Bug(
        "stale_input",
        "the feed-forward layer takes the input of attention",
        "ffn_in = residual\n",
        "ffn_in = input\n",
        modules=(BLOCK, MPT),
        golden=(f"{MPT}.norm_2*",),  # it is given another value
        also=("ffn_out = self.ffn(self.ffn_input_layer_norm(ffn_in))",),
    ),
)

FALCON_BUGS = (
    Bug(
        "not_by_group",
        "q, k and v are fused one after the other, not group by group",
        convert=fused(not_by_group),
        modules=(f"{BLOCK}.mha.input", f"{FALCON}.self_attention.query_key_value"),
    ),
    Bug(
        "v_groups",
        "the value heads are in another order",
        convert=fused(v_groups),
        modules=(f"{BLOCK}.mha.input", f"{FALCON}.self_attention.query_key_value"),
    ),
    Bug(
        "one_norm",
        "both layers have the norm of attention",
        convert=one_norm,
        modules=(f"{BLOCK}.ffn_input_layer_norm", f"{FALCON}.ln_mlp"),
    ),
    Bug(
        "transposed",
        "the output projection of attention is transposed",
        convert=transposed,
        modules=(f"{BLOCK}.mha.output", f"{FALCON}.self_attention.dense"),
    ),
    Bug(
        "layer_off",
        "a weight is that of the layer before",
        convert=layer_before("ffn.intermediate.weight"),
        modules=("decoder.layers.2.ffn.intermediate", "transformer.h.2.mlp.dense_h_to_4h"),
    ),
    Bug(
        "head_tied",
        "the head has the embedding's weight",
        convert=head_tied,
        modules=("output_embeddings", "lm_head"),
    ),
    Bug(
        "half_rotary",
        "RoPE turns half of each head",
        settings={"rotary_embedding_fraction": 0.5},
        modules=(
            ROTARY,
            f"{ROTARY}.rotary_embeds",
            f"{FALCON}.self_attention",
            "transformer.rotary_emb",
        ),
    ),
    Bug(
        "heads_repeated",
        "key heads are repeated in the wrong order",
        "key = key.repeat_interleave(n_tiling, dim=1)",
        "key = key.repeat(1, n_tiling, 1, 1)",
        modules=(f"{BLOCK}.mha", f"{FALCON}.self_attention"),
    ),
    Bug(
        "query_position",
        "queries are turned as if each call began at position zero",
        "query = self.rotary_embeds(query, positions=positions)",
        "query = self.rotary_embeds(query)",
        modules=(ROTARY, f"{FALCON}.self_attention"),
    ),
    Bug(
        "cache_slot",
        "keys of the cache are one place too far",
        "torch.cat([cache_k, key], dim=-2)",
        "torch.cat([cache_k.roll(1, -2), key], dim=-2)",
        modules=(f"{BLOCK}.mha", f"{FALCON}.self_attention"),
    ),
    Bug(
        "wrong_scale",
        "scores are scaled with the number of heads",
        "attn_scores /= math.sqrt(width)",
        "attn_scores /= math.sqrt(key.shape[1])",
        modules=(f"{BLOCK}.mha", SCORER, f"{FALCON}.self_attention"),
    ),
    Bug(
        "residual_normed",
        "the normalised input is the residual",
        "        residual = input\n\n        attn_out, cache = self.mha(",
        "        residual = self.attn_input_layer_norm(input)\n\n"
        "        attn_out, cache = self.mha(",
        modules=(BLOCK, FALCON),
        also=("return self.ffn_residual_layer_norm(residual + output), cache",),
    ),
)

PORTS = (
    Port(
        "curated-neox",
        partial(source, "gpt_neox", *PARTS),
        neox,
        make_neox,
        partial(convert, names=NEOX_NAMES, layers="gpt_neox.layers"),
        decode,
        work,
        neox_norms,
        NEOX_BUGS,
        package="curated_transformers",
        prepare=prepare,
        missing=partial(packages.missing, "curated_transformers"),
    ),
    Port(
        "curated-mpt",
        partial(source, "mpt", *PARTS),
        mpt,
        make_mpt,
        partial(convert, names=MPT_NAMES, layers="transformer.blocks"),
        decode,
        work,
        mpt_norms,
        MPT_BUGS,
        package="curated_transformers",
        prepare=prepare,
        missing=partial(packages.missing, "curated_transformers"),
    ),
    Port(
        "curated-falcon",
        partial(source, "falcon", "config", "layer", "decoder", "causal_lm"),
        falcon,
        make_falcon,
        partial(convert, names=FALCON_NAMES, layers="transformer.h"),
        partial(decode, keep=1),
        work,
        falcon_norms,
        FALCON_BUGS,
        package="curated_transformers",
        prepare=prepare,
        missing=partial(packages.missing, "curated_transformers"),
    ),
)
