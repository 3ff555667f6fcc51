"""Llama of keras-hub on Keras's torch backend, against Hugging Face's."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ports import packages
from ports.entry import Logits
from ports.made import SMALL, ported
from ports.steps import spans
from ports.weights import Model, State, hugging_face

SLOTS = 32
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
original = hugging_face("LlamaForCausalLM", SETTINGS)


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
            "num_query_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
            "rope_max_wavelength": c.rope_parameters["rope_theta"],
            "layer_norm_epsilon": c.rms_norm_eps, "activation": keras.ops.silu,
        }  # fmt: skip
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
    c = model.config
    width = c.hidden_size // c.num_attention_heads
    dtype = next(model.parameters()).dtype
    empty = torch.zeros(1, 2, SLOTS, c.num_key_value_heads, width, dtype=dtype)
    caches = [empty.clone() for _ in range(c.num_hidden_layers)]
    return [model(ids[:, first:last], caches, first) for first, last in spans(ids)]


def convert(hf: Model) -> State:
    c, state = hf.config, {}
    state["embedding.embeddings"] = hf.model.embed_tokens.weight
    state["embedding.reverse_embeddings"] = hf.lm_head.weight.T
    state["norm.scale"] = hf.model.norm.weight
    width = c.hidden_size // c.num_attention_heads
    for n, layer in enumerate(hf.model.layers):
        new, a, m = f"blocks.{n}", layer.self_attn, layer.mlp
        own = f"{new}._self_attention_layer"
        for name, linear in (("query", a.q_proj), ("key", a.k_proj), ("value", a.v_proj)):
            state[f"{own}._{name}_dense._kernel"] = linear.weight.T.unflatten(1, (-1, width))
        state[f"{own}._output_dense._kernel"] = a.o_proj.weight.T.unflatten(0, (-1, width))
        parts = (("gate", m.gate_proj), ("intermediate", m.up_proj), ("output", m.down_proj))
        for name, linear in parts:
            state[f"{new}._feedforward_{name}_dense._kernel"] = linear.weight.T
        state[f"{new}._self_attention_layernorm.scale"] = layer.input_layernorm.weight
        state[f"{new}._feedforward_layernorm.scale"] = layer.post_attention_layernorm.weight
    return {name: value.contiguous() for name, value in state.items()}


# -- bugs ----------------------------------------------------------------------------------------


def heads_inside(weight: torch.Tensor) -> torch.Tensor:
    """Return [width, heads, channels] as if the columns had been channels first."""
    return weight.flatten(1).unflatten(1, weight.shape[:0:-1]).mT


def out_transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(0, 1).T.reshape(weight.shape)


def head_tied(state: State) -> None:
    state["embedding.reverse_embeddings"] = state["embedding.embeddings"].T.clone()


GATE, UP = f"{BLOCK}._feedforward_gate_dense", f"{BLOCK}._feedforward_intermediate_dense"
ATTENTION = (OWN, f"{LAYER}.self_attn")
ROTARY = f"{OWN}.rotary_embedding_layer"
NORMS = (
    f"{BLOCK}._self_attention_layernorm", f"{BLOCK}._feedforward_layernorm", "norm",
    f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", "model.norm",
)  # fmt: skip
BUGS = r"""
heads_inside: the key kernels are split into channels, then heads
    weights each(heads_inside, f"{OWN}._key_dense")
    in $OWN._key_dense $LAYER.self_attn.k_proj
out_transposed: the square output kernel of layer 1 is not transposed
    weights each(out_transposed, "blocks.1._self_attention_layer._output_dense")
    in blocks.1._self_attention_layer._output_dense model.layers.1.self_attn.o_proj
up_for_gate: the kernels of gate and linear part are swapped
    weights swap(GATE, UP)
    in $GATE $UP $LAYER.mlp.gate_proj $LAYER.mlp.up_proj
head_tied: the head is tied
    weights head_tied
    in (root) embedding lm_head
of_the_layer_before: layer 2 has the down projection of layer 1
    weights copy(*(f"blocks.{n}._feedforward_output_dense" for n in (2, 1)))
    in blocks.2._feedforward_output_dense model.layers.2.mlp.down_proj
default_epsilon: the layers' norms have the default epsilon
    settings {"layer_norm_epsilon": 1e-06}
    in $NORMS
wavelength: the base of RoPE is another one
    settings {"rope_max_wavelength": 500}
    in $ROTARY $LAYER.self_attn model.rotary_emb
turned_back: RoPE turns the other way
    - half_rot_tensor = ops.stack((-x2, x1), axis=-2)
    + half_rot_tensor = ops.stack((x2, -x1), axis=-2)
    in $ROTARY $LAYER.self_attn
queries_from_zero: queries are turned as if each call began at place zero
    - query = self.rotary_embedding_layer(query, start_index=start_index)
    + query = self.rotary_embedding_layer(query)
    in $ATTENTION
values_tiled: value heads are tiled, key heads repeated
    - value = ops.repeat(value, repeats=self.num_key_value_groups, axis=2)
    + value = ops.tile(value, (1, 1, self.num_key_value_groups, 1))
    in $ATTENTION
keys_for_values: the value cache is filled with the keys
    - value = ops.slice_update(value_cache, start, value_update)
    + value = ops.slice_update(value_cache, start, key_update)
    in $ATTENTION
mean_not_squared: norms divide by the mean size, not the root mean square
    -         var = ops.mean(ops.power(x, 2), axis=-1, keepdims=True)
    +         var = ops.power(ops.mean(ops.abs(x), axis=-1, keepdims=True), 2)
    in $NORMS
residual_normed: the feed-forward part is added to its normalised input
    -         residual = x
    -
    -         x = self._feedforward_layernorm(x)
    +         x = residual = self._feedforward_layernorm(x)
    in $BLOCK $LAYER
    also decoder_output = x + residual
mask_one_late: the causal mask lets the next place through
    - input_length, output_length, cache_update_index
    + input_length, output_length, cache_update_index + 1
    in $BLOCK $ATTENTION model
"""
PORTS = (ported(globals(), "keras-llama", *NEEDED, package=""),)
