"""Llama of keras-hub on Keras's torch backend, against Hugging Face's."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ports import packages
from ports.entry import DECODE, Bug, Logits, Model, Port, State, decode, llama_norms
from ports.written import SMALL, each, original

LAYERS, SLOTS = SMALL["num_hidden_layers"], 32
LAYER, BLOCK = "model.layers.*", "blocks.*"
OWN = f"{BLOCK}._self_attention_layer"
NEEDED = ("keras", "keras_hub", "optree", "namex", "absl", "h5py")
FILES = (
    "layers/modeling/rotary_embedding.py",
    "layers/modeling/transformer_layer_utils.py",
    "models/llama/llama_rotary_embedding.py",
    "models/llama/llama_layernorm.py",
    "models/llama/llama_attention.py",
    "models/llama/llama_decoder.py",
)
PLAIN = ("api_export", "utils.keras_utils", "vllm.attention", "vllm.context")
SETTINGS = SMALL | {"rms_norm_eps": 1e-3, "max_position_embeddings": SLOTS}


@cache
def source() -> Path:
    os.environ["KERAS_BACKEND"] = "torch"
    packages.found(*NEEDED)
    packages.file("keras_hub", "")
    for name in PLAIN:
        import_module(f"keras_hub.src.{name}")
    return packages.joined("keras_hub", *(f"src/{name}" for name in FILES))


class Decoder(torch.nn.Module):
    """The layers in a row, as `LlamaCausalLM.call_with_cache` runs them."""

    def __init__(self, code: ModuleType, config: Any, settings: dict[str, Any]) -> None:
        super().__init__()
        self.code, self.config, self.settings = code, config, settings

    def build(self, dtype: str) -> None:
        import keras

        c = self.config
        self.embedding = keras.layers.ReversibleEmbedding(
            c.vocab_size, c.hidden_size, tie_weights=False, dtype=dtype
        )
        self.embedding.build()
        given = {
            "num_query_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "rope_max_wavelength": c.rope_parameters["rope_theta"],
            "layer_norm_epsilon": c.rms_norm_eps,
            "activation": keras.ops.silu,
        }
        self.blocks = torch.nn.ModuleList()
        for _ in range(c.num_hidden_layers):
            block = self.code.LlamaTransformerDecoder(
                c.intermediate_size, **{**given, **self.settings}, dtype=dtype
            )
            block.build((1, None, c.hidden_size))
            self.blocks.append(block)
        self.norm = self.code.LlamaLayerNorm(epsilon=c.rms_norm_eps, dtype=dtype)
        self.norm.build((1, None, c.hidden_size))

    def load_state_dict(self, state: State, strict: bool = True) -> Any:
        self.given = state
        self.restart("float32")
        return SimpleNamespace(missing_keys=[], unexpected_keys=[])

    def restart(self, dtype: str) -> None:
        """Make the layers with a dtype, and assign the weights."""
        self.build(dtype)
        for name, value in self.given.items():
            path, _, last = name.rpartition(".")
            getattr(self.get_submodule(path), last).assign(value)
        for layer in list(self.modules()):  # each makes its parameters known when asked for them
            list(layer.named_parameters())

    def forward(self, ids: torch.Tensor, caches: list[torch.Tensor], start: int) -> torch.Tensor:
        x = self.embedding(ids)
        for n, block in enumerate(self.blocks):
            x, caches[n] = block(
                x, self_attention_cache=caches[n], self_attention_cache_update_index=start
            )
        return self.embedding(self.norm(x), reverse=True)


def make(code: ModuleType, hf: Model, **settings: Any) -> Model:
    return Decoder(code, hf.config, settings)


def prepare(model: Model, dtype: torch.dtype) -> None:
    model.restart(str(dtype).removeprefix("torch."))
    model.eval()


@torch.no_grad()
def work(model: Model, ids: torch.Tensor) -> Logits:
    """Prefill all but the last tokens into the cache, then feed them one by one."""
    c, logits, start = model.config, [], 0
    width = c.hidden_size // c.num_attention_heads
    dtype = next(model.parameters()).dtype
    empty = torch.zeros(1, 2, SLOTS, c.num_key_value_heads, width, dtype=dtype)
    caches = [empty.clone() for _ in range(c.num_hidden_layers)]
    for part in (ids[:, :-DECODE], *ids[:, -DECODE:].split(1, dim=1)):
        logits.append(model(part, caches, start))
        start += part.shape[1]
    return logits


NAMES = {
    "_feedforward_gate_dense": "mlp.gate_proj",
    "_feedforward_intermediate_dense": "mlp.up_proj",
    "_feedforward_output_dense": "mlp.down_proj",
}


def convert(hf: Model) -> State:
    given, c = hf.state_dict(), hf.config
    state = {
        "embedding.embeddings": given["model.embed_tokens.weight"],
        "embedding.reverse_embeddings": given["lm_head.weight"].T,
        "norm.scale": given["model.norm.weight"],
    }
    heads = {"query": c.num_attention_heads, "key": c.num_key_value_heads}
    heads["value"] = heads["key"]
    for n in range(c.num_hidden_layers):
        old, new = f"model.layers.{n}", f"blocks.{n}"
        own = f"{new}._self_attention_layer"
        for kind, count in heads.items():
            weight = given[f"{old}.self_attn.{kind[0]}_proj.weight"].T
            state[f"{own}._{kind}_dense._kernel"] = weight.unflatten(1, (count, -1))
        out = given[f"{old}.self_attn.o_proj.weight"].T
        state[f"{own}._output_dense._kernel"] = out.unflatten(0, (heads["query"], -1))
        for ours, theirs in NAMES.items():
            state[f"{new}.{ours}._kernel"] = given[f"{old}.{theirs}.weight"].T
        state[f"{new}._self_attention_layernorm.scale"] = given[f"{old}.input_layernorm.weight"]
        after = given[f"{old}.post_attention_layernorm.weight"]
        state[f"{new}._feedforward_layernorm.scale"] = after
    return {name: value.contiguous() for name, value in state.items()}


# -- conversions gone wrong ----------------------------------------------------------------------


def heads_inside(weight: torch.Tensor) -> torch.Tensor:
    """Return [width, heads, channels] as if the columns had been channels first."""
    return weight.flatten(1).unflatten(1, weight.shape[:0:-1]).mT


def out_transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(0, 1).T.reshape(weight.shape)


def everywhere(name: str) -> list[str]:
    return [f"blocks.{n}.{name}" for n in range(LAYERS)]


def up_for_gate(state: State) -> None:
    for n in range(LAYERS):
        a, b = (f"blocks.{n}._feedforward_{x}_dense._kernel" for x in ("gate", "intermediate"))
        state[a], state[b] = state[b], state[a]


def head_tied(state: State) -> None:
    state["embedding.reverse_embeddings"] = state["embedding.embeddings"].T.clone()


def of_the_layer_before(name: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[f"blocks.2.{name}"] = state[f"blocks.1.{name}"].clone()

    return change


ATTENTION = (OWN, f"{LAYER}.self_attn")
ROTARY = f"{OWN}.rotary_embedding_layer"
NORMS = (
    f"{BLOCK}._self_attention_layernorm",
    f"{BLOCK}._feedforward_layernorm",
    "norm",
    f"{LAYER}.input_layernorm",
    f"{LAYER}.post_attention_layernorm",
    "model.norm",
)
BUGS = (
    Bug(
        "heads_inside",
        "the key kernels are split into channels, then heads",
        convert=each(heads_inside, *everywhere("_self_attention_layer._key_dense._kernel")),
        modules=(f"{OWN}._key_dense", f"{LAYER}.self_attn.k_proj"),
    ),
    Bug(
        "out_transposed",
        "the square output kernel of layer 1 is not transposed",
        convert=each(out_transposed, "blocks.1._self_attention_layer._output_dense._kernel"),
        modules=("blocks.1._self_attention_layer._output_dense", "model.layers.1.self_attn.o_proj"),
    ),
    Bug(
        "up_for_gate",
        "the kernels of gate and linear part are swapped",
        convert=up_for_gate,
        modules=(
            f"{BLOCK}._feedforward_gate_dense",
            f"{BLOCK}._feedforward_intermediate_dense",
            f"{LAYER}.mlp.gate_proj",
            f"{LAYER}.mlp.up_proj",
        ),
    ),
    Bug("head_tied", "the head is tied", convert=head_tied, modules=("", "embedding", "lm_head")),
    Bug(
        "of_the_layer_before",
        "layer 2 has the down projection of layer 1",
        convert=of_the_layer_before("_feedforward_output_dense._kernel"),
        modules=("blocks.2._feedforward_output_dense", "model.layers.2.mlp.down_proj"),
    ),
    Bug(
        "default_epsilon",
        "the layers' norms have the default epsilon",
        settings={"layer_norm_epsilon": 1e-6},
        modules=NORMS,
    ),
    Bug(
        "wavelength",
        "the base of RoPE is another one",
        settings={"rope_max_wavelength": 500},
        modules=(ROTARY, f"{LAYER}.self_attn", "model.rotary_emb"),
    ),
    Bug(
        "turned_back",
        "RoPE turns the other way",
        old="half_rot_tensor = ops.stack((-x2, x1), axis=-2)",
        new="half_rot_tensor = ops.stack((x2, -x1), axis=-2)",
        modules=(ROTARY, f"{LAYER}.self_attn"),
    ),
    Bug(
        "queries_from_zero",
        "queries are turned as if each call began at place zero",
        old="query = self.rotary_embedding_layer(query, start_index=start_index)",
        new="query = self.rotary_embedding_layer(query)",
        modules=ATTENTION,
    ),
    Bug(
        "values_tiled",
        "value heads are tiled, key heads repeated",
        old="value = ops.repeat(value, repeats=self.num_key_value_groups, axis=2)",
        new="value = ops.tile(value, (1, 1, self.num_key_value_groups, 1))",
        modules=ATTENTION,
    ),
    Bug(
        "keys_for_values",
        "the value cache is filled with the keys",
        old="value = ops.slice_update(value_cache, start, value_update)",
        new="value = ops.slice_update(value_cache, start, key_update)",
        modules=ATTENTION,
    ),
    Bug(
        "mean_not_squared",
        "norms divide by the mean size, not the root mean square",
        old="        var = ops.mean(ops.power(x, 2), axis=-1, keepdims=True)",
        new="        var = ops.power(ops.mean(ops.abs(x), axis=-1, keepdims=True), 2)",
        modules=NORMS,
    ),
    Bug(
        "residual_normed",
        "the feed-forward part is added to its normalised input",
        old="        residual = x\n\n        x = self._feedforward_layernorm(x)\n",
        new="        x = residual = self._feedforward_layernorm(x)\n",
        modules=(BLOCK, LAYER),
        also=("decoder_output = x + residual",),
    ),
    Bug(
        "mask_one_late",
        "the causal mask lets the next place through",
        old="input_length, output_length, cache_update_index\n        )\n\n        return (",
        new="input_length, output_length, cache_update_index + 1\n        )\n\n        return (",
        modules=(BLOCK, OWN, f"{LAYER}.self_attn", "model"),
    ),
)
PORTS = (
    Port(
        "keras-llama",
        source,
        lambda seed: original("Llama", seed, SETTINGS, 1.0),
        make,
        convert,
        decode,
        work,
        llama_norms,
        BUGS,
        prepare=prepare,
        missing=partial(packages.missing, *NEEDED),
    ),
)
