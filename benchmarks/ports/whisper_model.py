"""OpenAI's Whisper against that of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from ports import packages
from ports.entry import DECODE, Bug, Logits, Model, Port, State, spread

WIDTH, HEADS, LAYERS, VOCABULARY, PLACES = 64, 4, 3, 512, 32
MELS, FRAMES = 16, 48  # the first layer but one halves the frames
ENCODER, DECODER = "encoder.blocks.*", "decoder.blocks.*"
HF_ENCODER, HF_DECODER = "model.encoder.layers.*", "model.decoder.layers.*"


def original(seed: int, attention: str) -> Model:
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=MELS,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        max_source_positions=FRAMES // 2,
        max_target_positions=PLACES,
        init_std=0.12,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        attn_implementation=attention,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return spread(model, seed)


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms but the last ones: their outputs go to all layers, and to the embedding."""
    for layer in [*hf.model.encoder.layers, *hf.model.decoder.layers]:
        a = layer.self_attn
        yield layer.self_attn_layer_norm, [a.q_proj, a.k_proj, a.v_proj]
        if hasattr(layer, "encoder_attn"):
            yield layer.encoder_attn_layer_norm, [layer.encoder_attn.q_proj]
        yield layer.final_layer_norm, [layer.fc1]


def sound(dtype: torch.dtype) -> torch.Tensor:
    """Return a spectrogram, [1, mels, frames]."""
    generator = torch.Generator().manual_seed(77)
    return torch.randn(1, MELS, FRAMES, generator=generator).to(dtype)


def golden_whole(model: Model, ids: torch.Tensor) -> Logits:
    return [model(sound(model.dtype), decoder_input_ids=ids, use_cache=False).logits]


def golden_decode(model: Model, ids: torch.Tensor) -> Logits:
    """Encode the sound, prefill all but the last tokens, then feed them one by one."""
    encoded = model.model.encoder(sound(model.dtype))
    logits, cache, prompt = [], None, ids.shape[1] - DECODE
    for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
        out = model(
            encoder_outputs=encoded, decoder_input_ids=part, past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        logits.append(out.logits)
    return logits


# -- the port ------------------------------------------------------------------------------------


def source() -> Path:
    return packages.file(
        "whisper",
        "model.py",
        decoding={"decode": None, "detect_language": None},  # they want tiktoken
        transcribe={"transcribe": None},
    )


def make(code: ModuleType, hf: Model, **settings: int) -> Model:
    given: dict[str, Any] = {
        "n_mels": MELS,
        "n_audio_ctx": FRAMES // 2,
        "n_audio_state": WIDTH,
        "n_audio_head": HEADS,
        "n_audio_layer": LAYERS,
        "n_vocab": VOCABULARY,
        "n_text_ctx": PLACES,
        "n_text_state": WIDTH,
        "n_text_head": HEADS,
        "n_text_layer": LAYERS,
    }
    return code.Whisper(code.ModelDimensions(**{**given, **settings}))


NAMES = {
    "attn.query": "self_attn.q_proj",
    "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj",
    "attn.out": "self_attn.out_proj",
    "attn_ln": "self_attn_layer_norm",
    "cross_attn.query": "encoder_attn.q_proj",
    "cross_attn.key": "encoder_attn.k_proj",
    "cross_attn.value": "encoder_attn.v_proj",
    "cross_attn.out": "encoder_attn.out_proj",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "mlp_ln": "final_layer_norm",
}


def convert(hf: Model) -> State:
    """Return the weights under the names of Whisper's authors."""
    given = hf.state_dict()
    state = {
        "encoder.positional_embedding": given["model.encoder.embed_positions.weight"],
        "decoder.positional_embedding": given["model.decoder.embed_positions.weight"],
        "decoder.token_embedding.weight": given["model.decoder.embed_tokens.weight"],
    }
    pairs = {
        "encoder.conv1": "encoder.conv1",
        "encoder.conv2": "encoder.conv2",
        "encoder.ln_post": "encoder.layer_norm",
        "decoder.ln": "decoder.layer_norm",
    }
    for side in ("encoder", "decoder"):
        for n in range(LAYERS):
            for ours, theirs in NAMES.items():
                pairs[f"{side}.blocks.{n}.{ours}"] = f"{side}.layers.{n}.{theirs}"
    for ours, theirs in pairs.items():
        for kind in ("weight", "bias"):
            if f"model.{theirs}.{kind}" in given:  # keys have no bias, encoders no cross attention
                state[f"{ours}.{kind}"] = given[f"model.{theirs}.{kind}"]
    return state


def prepare(model: Model, dtype: torch.dtype) -> None:
    """Let the norms have weights in float32, as they run in it; note the dtype of the sound."""
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.float()
    model.sound_dtype = dtype


def whole(model: Model, ids: torch.Tensor) -> Logits:
    return [model(sound(model.sound_dtype), ids)]


def work(model: Model, ids: torch.Tensor) -> Logits:
    """Decode with a cache that hooks on the projections fill, as the package's own loop does."""
    encoded = model.embed_audio(sound(model.sound_dtype))
    cache, hooks = model.install_kv_cache_hooks()
    logits, prompt = [], ids.shape[1] - DECODE
    for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
        logits.append(model.decoder(part, encoded, kv_cache=cache))
    for hook in hooks:
        hook.remove()
    return logits


# -- changes of weights --------------------------------------------------------------------------


def swap(a: str, b: str, sides: tuple[str, ...] = ("encoder", "decoder")) -> Callable[..., None]:
    """Return what swaps the weights of two modules of each layer."""

    def change(state: State) -> None:
        for side in sides:
            for n in range(LAYERS):
                for kind in ("weight", "bias"):
                    one, other = (f"{side}.blocks.{n}.{name}.{kind}" for name in (a, b))
                    if one in state and other in state:
                        state[one], state[other] = state[other], state[one]

    return change


def layer_before(state: State) -> None:
    name = "decoder.blocks.{}.cross_attn.value.weight"
    state[name.format(2)] = state[name.format(1)].clone()


def k_heads(state: State) -> None:
    for n in range(LAYERS):
        name = f"decoder.blocks.{n}.cross_attn.key.weight"
        state[name] = state[name].view(HEADS, -1, WIDTH)[[1, 0, 3, 2]].flatten(0, 1)


def sound_places_interleaved(state: State) -> None:
    """Put sines and cosines in turn, not one after the other."""
    name = "encoder.positional_embedding"
    state[name] = state[name].view(-1, 2, WIDTH // 2).transpose(1, 2).flatten(1)


def places_off(state: State) -> None:
    name = "decoder.positional_embedding"
    state[name] = state[name].roll(1, 0)


def bias_left(state: State) -> None:
    for n in range(LAYERS):
        state[f"decoder.blocks.{n}.attn.out.bias"].zero_()


def kernel_flipped(state: State) -> None:
    state["encoder.conv2.weight"] = state["encoder.conv2.weight"].flip(2)


# -- bugs ----------------------------------------------------------------------------------------

ATTENTION = (
    f"{ENCODER}.attn", f"{DECODER}.attn", f"{DECODER}.cross_attn",
    f"{HF_ENCODER}.self_attn", f"{HF_DECODER}.self_attn", f"{HF_DECODER}.encoder_attn",
)  # fmt: skip
IN_TIME = (
    Bug(
        "no_offset",
        "the embeddings of positions begin at zero in each call",
        "self.positional_embedding[offset : offset + x.shape[-1]]",
        "self.positional_embedding[: x.shape[-1]]",
        modules=("decoder", "model.decoder", "model.decoder.embed_positions"),
    ),
    Bug(
        "offset_off",
        "the embeddings of positions are one late while decoding",
        "offset = next(iter(kv_cache.values())).shape[1] if kv_cache else 0",
        "offset = next(iter(kv_cache.values())).shape[1] - 1 if kv_cache else 0",
        modules=("decoder", "model.decoder", "model.decoder.embed_positions"),
        also=("+ self.positional_embedding[offset",),
    ),
    Bug(
        "cache_order",
        "new keys and values are put before those of the cache",
        "torch.cat([cache[module], output], dim=1)",
        "torch.cat([output, cache[module][:, :-1]], dim=1)",
        modules=(
            f"{DECODER}.attn",
            f"{DECODER}.attn.key",
            f"{DECODER}.attn.value",
            f"{HF_DECODER}.self_attn",
            f"{HF_DECODER}.self_attn.[kv]_proj",
        ),
    ),
    Bug(
        "values_of_text",
        "cross attention takes its values from the text",
        "v = self.value(x if xa is None else xa)",
        "v = self.value(x)",
        modules=(f"{DECODER}.cross_attn", f"{HF_DECODER}.encoder_attn"),
    ),
)
BUGS = (
    Bug(
        "norms_swapped",
        "the norms before attention and before cross attention are swapped",
        convert=swap("attn_ln", "cross_attn_ln", ("decoder",)),
        modules=(
            f"{DECODER}.attn_ln",
            f"{DECODER}.cross_attn_ln",
            f"{HF_DECODER}.self_attn_layer_norm",
            f"{HF_DECODER}.encoder_attn_layer_norm",
        ),
    ),
    Bug(
        "attentions_swapped",
        "attention and cross attention have each other's output projection",
        convert=swap("attn.out", "cross_attn.out", ("decoder",)),
        modules=(
            f"{DECODER}.attn.out",
            f"{DECODER}.cross_attn.out",
            f"{HF_DECODER}.self_attn.out_proj",
            f"{HF_DECODER}.encoder_attn.out_proj",
        ),
    ),
    Bug(
        "query_key",
        "queries and keys are swapped, and the bias stays",
        convert=swap("attn.query", "attn.key"),
        modules=(
            f"{ENCODER}.attn.query",
            f"{ENCODER}.attn.key",
            f"{HF_ENCODER}.self_attn.[qk]_proj",
            f"{DECODER}.attn.query",
            f"{DECODER}.attn.key",
            f"{HF_DECODER}.self_attn.[qk]_proj",
        ),
    ),
    Bug(
        "layer_off",
        "a value projection is that of the layer before",
        convert=layer_before,
        modules=("decoder.blocks.2.cross_attn.value", "model.decoder.layers.2.encoder_attn.v_proj"),
    ),
    Bug(
        "k_heads",
        "the key heads of cross attention are in another order",
        convert=k_heads,
        modules=(f"{DECODER}.cross_attn.key", f"{HF_DECODER}.encoder_attn.k_proj"),
    ),
    Bug(
        "sound_places",
        "sines and cosines of the sound's positions are interleaved",
        convert=sound_places_interleaved,
        modules=("encoder", "model.encoder", "model.encoder.embed_positions"),
    ),
    Bug(
        "places_off",
        "the embeddings of the positions are one off",
        convert=places_off,
        modules=("decoder", "model.decoder", "model.decoder.embed_positions"),
    ),
    Bug(
        "bias_left",
        "a bias is not loaded",
        convert=bias_left,
        modules=(f"{DECODER}.attn.out", f"{HF_DECODER}.self_attn.out_proj"),
    ),
    Bug(
        "kernel_flipped",
        "the kernel of a convolution is mirrored",
        convert=kernel_flipped,
        modules=("encoder.conv2", "model.encoder.conv2"),
    ),
    Bug(
        "mask_left",
        "the decoder's attention sees all tokens",
        "is_causal=mask is not None and n_ctx > 1",
        "is_causal=False",
        modules=(f"{DECODER}.attn", f"{HF_DECODER}.self_attn"),
    ),
    Bug(
        "heads_split",
        "the heads of the values are split the other way",
        "v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)",
        "v = v.view(*v.shape[:2], -1, self.n_head).permute(0, 3, 1, 2)",
        modules=ATTENTION,
    ),
    Bug(
        "no_residual",
        "the residual is not added after cross attention",
        "x = x + self.cross_attn(",
        "x = self.cross_attn(",
        modules=(DECODER, HF_DECODER),
        golden=(f"{HF_DECODER}/Tensor.add",),
    ),
    Bug(
        "no_activation",
        "the first convolution has no activation",
        "x = F.gelu(self.conv1(x))",
        "x = self.conv1(x)",
        modules=("encoder", "model.encoder"),
        golden=("model.encoder/Functional.gelu",),
    ),
    Bug(
        "silu",
        "the activation is another one",
        "Linear(n_state, n_mlp), nn.GELU(), Linear",
        "Linear(n_state, n_mlp), nn.SiLU(), Linear",
        modules=(
            f"{ENCODER}.mlp.1",
            f"{DECODER}.mlp.1",
            f"{HF_ENCODER}.activation_fn",
            f"{HF_DECODER}.activation_fn",
        ),
        early=True,
    ),
)

PORTS = tuple(
    Port(
        name,
        source,
        partial(original, attention=attention),
        make,
        convert,
        golden,
        mine,
        norms,
        bugs,
        package="whisper",
        prepare=prepare,
        missing=partial(packages.missing, "whisper"),
    )
    for name, attention, golden, mine, bugs in (
        ("whisper", "eager", golden_whole, whole, BUGS),
        ("whisper-decoding", "sdpa", golden_decode, work, IN_TIME),
    )
)
