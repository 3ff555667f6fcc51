"""torchtune's Llama 3, Qwen 2 and Gemma 2 against those of Hugging Face."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from ports import packages
from ports.entry import DECODE, Bug, Logits, Model, Port, State, decode, llama_norms, spread

WIDTH, HEADS, GROUPS, VOCABULARY, LAYERS, PLACES = 64, 4, 2, 512, 3, 32
HEAD = WIDTH // HEADS
BLOCK, LAYER = "layers.*", "model.layers.*"
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "initializer_range": 0.12,
    "max_position_embeddings": 128,
}


def original(kind: str, seed: int, **settings: Any) -> Model:
    config = getattr(transformers, f"{kind}Config")(**SETTINGS, **settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return spread(model, seed)


llama = partial(
    original,
    "Llama",
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    tie_word_embeddings=False,
    attn_implementation="sdpa",
)
qwen = partial(
    original,
    "Qwen2",
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    tie_word_embeddings=True,
    attn_implementation="sdpa",
)
gemma = partial(
    original,
    "Gemma2",
    head_dim=32,
    query_pre_attn_scalar=24,
    sliding_window=6,
    attn_logit_softcapping=4.0,
    final_logit_softcapping=6.0,
    attn_implementation="eager",
)


def gemma_norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms before linear layers; the others add to the residual."""
    for layer in hf.model.layers:
        a, m = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [a.q_proj, a.k_proj, a.v_proj]
        yield layer.pre_feedforward_layernorm, [m.gate_proj, m.up_proj]


def tied_norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms but the last one: what takes its output is the embedding too."""
    yield from list(llama_norms(hf))[:-1]


# -- the ports -----------------------------------------------------------------------------------

COMMON = (
    "modules/kv_cache.py",
    "modules/rms_norm.py",
    "modules/tied_linear.py",
    "modules/feed_forward.py",
    "modules/position_embeddings.py",
    "modules/attention_utils.py",
    "modules/attention.py",
    "modules/transformer.py",
)
# what attention takes from modules that look at the machine
STUBS: dict[str, dict[str, Any]] = {
    "utils___import_guard": {"_SUPPORTS_FLEX_ATTENTION": False},
    "utils___logging": {"get_logger": logging.getLogger, "log_once": None},
}


def source(*files: str) -> Path:
    packages.file("torchtune", "", **STUBS)
    return packages.joined("torchtune", *COMMON, *files, without="lora_")


def sizes(hf: Model, **settings: Any) -> dict[str, Any]:
    """Return what all builders take."""
    config = hf.config
    given = {
        "vocab_size": VOCABULARY,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "num_kv_heads": GROUPS,
        "embed_dim": WIDTH,
        "intermediate_dim": config.intermediate_size,
        "max_seq_len": PLACES,
        "norm_eps": config.rms_norm_eps,
        "rope_base": config.rope_parameters["rope_theta"],
    }
    return {**given, **settings}


def make_llama(code: ModuleType, hf: Model, **settings: Any) -> Model:
    return code.llama3(**sizes(hf, **settings))


def make_qwen(code: ModuleType, hf: Model, **settings: Any) -> Model:
    return code.qwen2(**sizes(hf, tie_word_embeddings=True, **settings))


def make_gemma(code: ModuleType, hf: Model, cap_hidden: bool = False, **settings: Any) -> Model:
    """Return torchtune's Gemma 2, its logits capped. ``cap_hidden``: what they are made from is.

    torchtune's own builder caps the output of the last norm, which is wrong.
    """
    config = hf.config
    given = {
        "head_dim": config.head_dim,
        "hidden_capping_value": config.attn_logit_softcapping,
        "final_capping_value": config.final_logit_softcapping,
        "sliding_window_size": config.sliding_window,
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
    }
    model = code.gemma2(**sizes(hf, **{**given, **settings}))
    last, tied = model.norm, model.output
    model.norm, model.logit_capping = last.rms_norm, last.logit_capping
    if cap_hidden:
        model.output = lambda hidden: tied(model.logit_capping(hidden))
    else:
        model.output = lambda hidden: model.logit_capping(tied(hidden))
    return model


NAMES = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
}
TWO_NORMS = {"sa_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "sa_norm": "input_layernorm",
    "sa_scale": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_scale": "post_feedforward_layernorm",
}


def convert(hf: Model, norms: dict[str, str], permuted: bool, last: str = "norm.scale") -> State:
    """Return the weights under torchtune's names. ``permuted``: RoPE is interleaved."""
    given = hf.state_dict()
    state = {
        "tok_embeddings.weight": given["model.embed_tokens.weight"],
        last: given["model.norm.weight"],
    }
    if not hf.config.tie_word_embeddings:
        state["output.weight"] = given["lm_head.weight"]
    for n in range(LAYERS):
        old, new = f"model.layers.{n}", f"layers.{n}"
        for ours, theirs in norms.items():
            state[f"{new}.{ours}.scale"] = given[f"{old}.{theirs}.weight"]
        for ours, theirs in NAMES.items():
            for kind in ("weight", "bias"):
                if f"{old}.{theirs}.{kind}" in given:
                    state[f"{new}.{ours}.{kind}"] = given[f"{old}.{theirs}.{kind}"]
        if permuted:
            interleave(state, new)
    return state


def interleave(state: State, path: str, kinds: tuple[str, ...] = ("weight", "bias")) -> None:
    """Put the rows of each head of q and k in the order that interleaved RoPE wants."""
    for part, heads in (("q", HEADS), ("k", GROUPS)):
        for kind in kinds:
            name = f"{path}.attn.{part}_proj.{kind}"
            if name in state:
                rows = torch.arange(len(state[name])).view(heads, 2, -1).transpose(1, 2).flatten()
                state[name] = state[name][rows]


def prepare(model: Model, dtype: torch.dtype) -> None:
    model.setup_caches(batch_size=1, dtype=dtype, decoder_max_seq_len=PLACES)


def work(model: Model, ids: torch.Tensor) -> Logits:
    """Prefill all but the last tokens, then feed them one by one, as torchtune's generation."""
    model.reset_caches()
    mask = torch.tril(torch.ones(PLACES, PLACES, dtype=torch.bool))[None]
    logits, prompt = [], ids.shape[1] - DECODE
    for first, last in [(0, prompt), *((n, n + 1) for n in range(prompt, ids.shape[1]))]:
        places = torch.arange(first, last)[None]
        part = ids[:, first:last]
        logits.append(model(part, mask=mask[:, first:last], input_pos=places))
    return logits


def whole(model: Model, ids: torch.Tensor) -> Logits:
    """Give all tokens at once: torchtune's sliding window counts from the start of each call."""
    return [model(ids)]


def golden_whole(model: Model, ids: torch.Tensor) -> Logits:
    return [model(ids, use_cache=False).logits]


# -- changes of weights --------------------------------------------------------------------------


def each(change: Callable[[State, str], None]) -> Callable[[State], None]:
    """Return what changes the weights of each layer. ``change(state, path of the layer)``."""

    def apply(state: State) -> None:
        for n in range(LAYERS):
            change(state, f"layers.{n}")

    return apply


def swap(a: str, b: str) -> Callable[[State, str], None]:
    def change(state: State, path: str) -> None:
        first, second = f"{path}.{a}", f"{path}.{b}"
        state[first], state[second] = state[second], state[first]

    return change


def layer_before(name: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[f"layers.2.{name}"] = state[f"layers.1.{name}"].clone()

    return change


def deinterleave(state: State, path: str) -> None:
    """Undo `interleave`."""
    for part, heads in (("q", HEADS), ("k", GROUPS)):
        name = f"{path}.attn.{part}_proj.weight"
        rows = torch.arange(len(state[name])).view(heads, -1, 2).transpose(1, 2).flatten()
        state[name] = state[name][rows]


def head_tied(state: State) -> None:
    state["output.weight"] = state["tok_embeddings.weight"].clone()


def value_bias_left(state: State, path: str) -> None:
    state[f"{path}.attn.v_proj.bias"].zero_()


def one_stored(state: State) -> None:
    """Store one plus the weight of each norm, as a norm wants that doesn't add the one."""
    for name in state:
        if name.endswith(".scale"):
            state[name] += 1


def k_heads(state: State, path: str) -> None:
    name = f"{path}.attn.k_proj.weight"
    state[name] = state[name].view(GROUPS, -1, WIDTH).flip(0).flatten(0, 1)


def transposed(state: State, path: str) -> None:
    name = f"{path}.attn.output_proj.weight"
    state[name] = state[name].T.contiguous()


# -- bugs ----------------------------------------------------------------------------------------

ATTENTION = (f"{BLOCK}.attn", f"{LAYER}.self_attn")
QK = (f"{BLOCK}.attn.[qk]_proj", f"{LAYER}.self_attn.[qk]_proj")
ROPE = (f"{BLOCK}.attn.pos_embeddings", "model.rotary_emb")
MLP = (f"{BLOCK}.mlp", f"{LAYER}.mlp")
ACTIVATION = (f"{BLOCK}.mlp.activation", f"{LAYER}.mlp.act_fn")
NORMS = (
    f"{BLOCK}.sa_norm", f"{BLOCK}.mlp_norm", "norm",
    f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", "model.norm",
)  # fmt: skip
GEMMA_NORMS = (f"{BLOCK}.*_norm", f"{BLOCK}.*_scale", "norm", f"{LAYER}.*layernorm", "model.norm")
GATE_UP = (f"{BLOCK}.mlp.w[13]", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj")
ROTATED = """+ xshaped[..., 0] * rope_cache[..., 1],
            ],
            -1,
        )

        # tensor has shape [b, s, n_h, h_d]
        x_out = x_out.flatten(3)"""

LLAMA_BUGS = (
    Bug(
        "rope_layout",
        "q and k keep the order of RoPE by halves",
        convert=each(deinterleave),
        modules=QK,
    ),
    Bug(
        "norms_swapped",
        "the two norms of each layer are swapped",
        convert=each(swap("sa_norm.scale", "mlp_norm.scale")),
        modules=NORMS,
    ),
    Bug(
        "gate_up",
        "gate and up are swapped",
        convert=each(swap("mlp.w1.weight", "mlp.w3.weight")),
        modules=GATE_UP,
    ),
    Bug(
        "layer_off",
        "a value projection is that of the layer before",
        convert=layer_before("attn.v_proj.weight"),
        modules=("layers.2.attn.v_proj", "model.layers.2.self_attn.v_proj"),
    ),
    Bug(
        "head_tied",
        "the head has the embedding's weight",
        convert=head_tied,
        modules=("output", "lm_head"),
    ),
    Bug(
        "wrong_eps",
        "eps of the norms is 100 times too large",
        settings={"norm_eps": 1e-3},
        modules=NORMS,
    ),
    Bug("rope_base", "the base of RoPE is 10,000", settings={"rope_base": 10000}, modules=ROPE),
    Bug(
        "rotate_sign",
        "the second half of each pair is turned the other way",
        ROTATED,
        ROTATED.replace("+ xshaped", "- xshaped"),
        modules=(f"{BLOCK}.attn.pos_embeddings", f"{LAYER}.self_attn"),
    ),
    Bug(
        "cache_slot",
        "keys are stored one place too far",
        "k_out[:, :, self.cache_pos[:seq_len]] = k_val",
        "k_out[:, :, self.cache_pos[:seq_len] + 1] = k_val",
        modules=ATTENTION,
    ),
    Bug(
        "keys_from_zero",
        "keys are turned as if each call began at position zero",
        "k = self.pos_embeddings(k, input_pos=input_pos)",
        "k = self.pos_embeddings(k)",
        modules=ATTENTION,
    ),
    Bug(
        "heads_repeated",
        "value heads are repeated in the wrong order",
        "v = v.unsqueeze(2).expand(expand_shape).flatten(1, 2)",
        "v = v.repeat(1, q_per_kv, 1, 1)",
        modules=ATTENTION,
    ),
    Bug(
        "normed_residual",
        "the normalised input is added after attention",
        "h = self.sa_scale(attn_out) + x",
        "h = self.sa_scale(attn_out) + h",
        modules=(BLOCK, LAYER),
    ),
)

QWEN_BUGS = (
    Bug(
        "rope_layout",
        "q and k are ordered for interleaved RoPE",
        convert=each(interleave),
        modules=QK,
    ),
    Bug(
        "bias_layout",
        "the biases of q and k are ordered for interleaved RoPE",
        convert=each(partial(interleave, kinds=("bias",))),
        modules=QK,
    ),
    Bug(
        "bias_left",
        "the bias of the values is not loaded",
        convert=each(value_bias_left),
        modules=(f"{BLOCK}.attn.v_proj", f"{LAYER}.self_attn.v_proj"),
    ),
    Bug(
        "layer_off",
        "a down projection is that of the layer before",
        convert=layer_before("mlp.w2.weight"),
        modules=("layers.2.mlp.w2", "model.layers.2.mlp.down_proj"),
    ),
    Bug(
        "transposed",
        "the output projection of attention is transposed",
        convert=each(transposed),
        modules=(f"{BLOCK}.attn.output_proj", f"{LAYER}.self_attn.o_proj"),
    ),
    Bug("rope_base", "the base of RoPE is 10,000", settings={"rope_base": 1e4}, modules=ROPE),
    Bug(
        "rotate_sign",
        "RoPE turns the other way",
        "rotated = torch.cat((-x2, x1), dim=-1)",
        "rotated = torch.cat((x2, -x1), dim=-1)",
        modules=(f"{BLOCK}.attn.pos_embeddings", f"{LAYER}.self_attn"),
    ),
    Bug(
        "query_position",
        "queries are turned as if they were one position later",
        "q = self.pos_embeddings(q, input_pos=input_pos)",
        "q = self.pos_embeddings(q, input_pos=input_pos + 1)",
        modules=ATTENTION,
    ),
    Bug(
        "cache_advance",
        "the cache moves on by one place after a prompt of many",
        "self.cache_pos.add_(seq_len)",
        "self.cache_pos.add_(1)",
        modules=ATTENTION,
        also=("k_out[:, :, self.cache_pos[:seq_len]]", "v_out[:, :, self.cache_pos[:seq_len]]"),
    ),
    Bug(
        "norm_mean",
        "the norms subtract the mean",
        "return F.rms_norm(",
        "return F.layer_norm(",
        modules=NORMS,
    ),
    Bug(
        "gelu",
        "GELU for SiLU",
        "activation: nn.Module = nn.SiLU()",
        "activation: nn.Module = nn.GELU()",
        modules=ACTIVATION,
        early=True,
    ),
)

GEMMA_BUGS = (
    Bug(
        "norms_swapped",
        "the norms before and after the feed-forward layer are swapped",
        convert=each(swap("mlp_norm.scale", "mlp_scale.scale")),
        modules=(
            f"{BLOCK}.mlp_norm",
            f"{BLOCK}.mlp_scale",
            f"{LAYER}.pre_feedforward_layernorm",
            f"{LAYER}.post_feedforward_layernorm",
        ),
    ),
    Bug(
        "hidden_capped",
        "the output of the last norm is capped, the logits are not",
        settings={"cap_hidden": True},
        modules=("", "logit_capping"),
        golden=("/Tensor.div", "/Torch.tanh", "/Tensor.mul"),
    ),
    Bug(
        "scores_not_capped",
        "the soft cap of the scores is left out",
        settings={"hidden_capping_value": None},
        modules=ATTENTION,
        golden=(
            f"{LAYER}.self_attn/Tensor.div",
            f"{LAYER}.self_attn/Torch.tanh",
            f"{LAYER}.self_attn/Tensor.mul@eager_attention_forward",
        ),
    ),
    Bug(
        "wrong_cap",
        "the scores are capped at another value",
        settings={"hidden_capping_value": 6.0},
        modules=ATTENTION,
    ),
    Bug(
        "wrong_scale",
        "scores are scaled with the width of a head",
        settings={"query_pre_attn_scalar": None},
        modules=ATTENTION,
    ),
    Bug(
        "window_one_wider",
        "the sliding window holds one token more",
        "-1 * self.sliding_window_size + 1",
        "-1 * self.sliding_window_size",
        modules=("model", *ATTENTION),
    ),
    Bug(
        "local_and_global_swapped",
        "layers with a sliding window see all, the others a window",
        "(layer_idx % 2)==0",
        "(layer_idx % 2)==1",
        modules=("model", *ATTENTION, f"{LAYER}"),
        early=True,
    ),
    Bug(
        "one_stored",
        "norm weights are stored with the one",
        convert=one_stored,
        modules=GEMMA_NORMS,
    ),
    Bug(
        "embedding_scale",
        "the embeddings are not scaled",
        "return x * torch.tensor(self.embedding_dim**0.5, dtype=x.dtype)",
        "return x",
        modules=("tok_embeddings", "model.embed_tokens"),
        golden=("model.embed_tokens/Tensor.mul",),
    ),
    Bug(
        "no_post_norm",
        "the output of the feed-forward layer is not normalised",
        "out = h + self.mlp_scale(mlp_out)\n        return out\n\n\nclass TransformerCross",
        "out = h + mlp_out\n        return out\n\n\nclass TransformerCross",
        modules=(BLOCK, LAYER),
        golden=(f"{LAYER}.post_feedforward_layernorm*",),
    ),
    Bug(
        "k_heads",
        "the key heads are in another order",
        convert=each(k_heads),
        modules=(f"{BLOCK}.attn.k_proj", f"{LAYER}.self_attn.k_proj"),
    ),
)

PORTS = (
    Port(
        "torchtune-llama3",
        partial(source, "models/llama3/_component_builders.py"),
        llama,
        make_llama,
        partial(convert, norms=TWO_NORMS, permuted=True),
        partial(decode, keep=0),
        work,
        llama_norms,
        LLAMA_BUGS,
        package="torchtune",
        prepare=prepare,
        missing=partial(packages.missing, "torchtune"),
    ),
    Port(
        "torchtune-qwen2",
        partial(
            source,
            "models/qwen2/_positional_embeddings.py",
            "models/qwen2/_component_builders.py",
        ),
        qwen,
        make_qwen,
        partial(convert, norms=TWO_NORMS, permuted=False),
        partial(decode, keep=1),  # as generate does
        work,
        tied_norms,
        QWEN_BUGS,
        package="torchtune",
        prepare=prepare,
        missing=partial(packages.missing, "torchtune"),
    ),
    Port(
        "torchtune-gemma2",
        partial(
            source,
            "models/gemma/rms_norm.py",
            "models/gemma/gemma_norm_embedding.py",
            "models/gemma/_component_builders.py",
            "models/gemma2/_attention.py",
            "models/gemma2/_component_builders.py",
        ),
        gemma,
        make_gemma,
        partial(convert, norms=FOUR_NORMS, permuted=True),
        golden_whole,
        whole,
        gemma_norms,
        GEMMA_BUGS,
        length=20,
        offset=1.0,
        package="torchtune",
        missing=partial(packages.missing, "torchtune"),
    ),
)
