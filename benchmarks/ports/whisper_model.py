"""OpenAI's Whisper against that of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ports import packages
from ports.entry import Logits
from ports.made import ported
from ports.steps import parts
from ports.weights import Model, hugging_face, norms_of

WIDTH, HEADS, LAYERS, VOCABULARY, PLACES = 64, 4, 3, 512, 32
MELS, FRAMES = 16, 48  # the first layer but one halves the frames
ENCODER, DECODER = "encoder.blocks.*", "decoder.blocks.*"
HF_ENCODER, HF_DECODER = "model.encoder.layers.*", "model.decoder.layers.*"
SETTINGS = {
    "vocab_size": VOCABULARY, "num_mel_bins": MELS, "d_model": WIDTH, "encoder_layers": LAYERS,
    "decoder_layers": LAYERS, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH,
    "max_source_positions": FRAMES // 2, "max_target_positions": PLACES, "init_std": 0.12,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
# but the last ones: their outputs go to all layers, and to the embedding
norms = norms_of(
    "model.{encoder,decoder}.layers",
    {
        "self_attn_layer_norm": "self_attn.{q,k,v}_proj",
        "encoder_attn_layer_norm": "encoder_attn.q_proj",
        "final_layer_norm": "fc1",
    },
)


def sound(dtype: torch.dtype) -> torch.Tensor:
    """Return a spectrogram, [1, mels, frames]."""
    generator = torch.Generator().manual_seed(77)
    return torch.randn(1, MELS, FRAMES, generator=generator).to(dtype)


def golden_whole(model: Model, ids: torch.Tensor) -> Logits:
    return [model(sound(model.dtype), decoder_input_ids=ids, use_cache=False).logits]


def golden_decode(model: Model, ids: torch.Tensor) -> Logits:
    """Encode the sound, prefill all but the last tokens, then feed them one by one."""
    encoded = model.model.encoder(sound(model.dtype))
    logits, cache = [], None
    for part in parts(ids):
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
        "n_mels": MELS, "n_audio_ctx": FRAMES // 2, "n_audio_state": WIDTH, "n_audio_head": HEADS,
        "n_audio_layer": LAYERS, "n_vocab": VOCABULARY, "n_text_ctx": PLACES,
        "n_text_state": WIDTH, "n_text_head": HEADS, "n_text_layer": LAYERS,
    }  # fmt: skip
    return code.Whisper(code.ModelDimensions(**{**given, **settings}))


# encoders have no cross attention; the first star is the side
A, C = "model.*.layers.*.self_attn", "model.*.layers.*.encoder_attn"
NAMES = {
    "*.blocks.*.attn.{query,key,value,out}": f"{A}.{{q_proj,k_proj,v_proj,out_proj}}",
    "*.blocks.*.attn_ln": f"{A}_layer_norm",
    "*.blocks.*.cross_attn.{query,key,value,out}": f"{C}.{{q_proj,k_proj,v_proj,out_proj}}",
    "*.blocks.*.cross_attn_ln": f"{C}_layer_norm",
    "*.blocks.*.mlp.{0,2}": "model.*.layers.*.{fc1,fc2}",
    "*.blocks.*.mlp_ln": "model.*.layers.*.final_layer_norm",
    "encoder.{conv1,conv2,ln_post}": "model.encoder.{conv1,conv2,layer_norm}",
    "decoder.ln": "model.decoder.layer_norm",
    "*.positional_embedding": "model.*.embed_positions.weight",
    "decoder.token_embedding": "model.decoder.embed_tokens",
}


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
    logits = [model.decoder(part, encoded, kv_cache=cache) for part in parts(ids)]
    for hook in hooks:
        hook.remove()
    return logits


# -- bugs ----------------------------------------------------------------------------------------


def sines_and_cosines_in_turn(table: torch.Tensor) -> torch.Tensor:
    return table.view(-1, 2, WIDTH // 2).transpose(1, 2).flatten(1)


ATTENTION = (
    f"{ENCODER}.attn", f"{DECODER}.attn", f"{DECODER}.cross_attn",
    f"{HF_ENCODER}.self_attn", f"{HF_DECODER}.self_attn", f"{HF_DECODER}.encoder_attn",
)  # fmt: skip
TEXT_PLACES = ("decoder", "model.decoder", "model.decoder.embed_positions")
IN_TIME = r"""
no_offset: the embeddings of positions begin at zero in each call
    - self.positional_embedding[offset : offset + x.shape[-1]]
    + self.positional_embedding[: x.shape[-1]]
    in $TEXT_PLACES
offset_off: the embeddings of positions are one late while decoding
    - offset = next(iter(kv_cache.values())).shape[1] if kv_cache else 0
    + offset = next(iter(kv_cache.values())).shape[1] - 1 if kv_cache else 0
    in $TEXT_PLACES
    also + self.positional_embedding[offset
cache_order: new keys and values are put before those of the cache
    - torch.cat([cache[module], output], dim=1)
    + torch.cat([output, cache[module][:, :-1]], dim=1)
    in $DECODER.attn $DECODER.attn.key $DECODER.attn.value $HF_DECODER.self_attn
    in $HF_DECODER.self_attn.[kv]_proj
values_of_text: cross attention takes its values from the text
    - v = self.value(x if xa is None else xa)
    + v = self.value(x)
    in $DECODER.cross_attn $HF_DECODER.encoder_attn
"""
BUGS = r"""
norms_swapped: the norms before attention and before cross attention are swapped
    weights swap("decoder.blocks.*.attn_ln", "decoder.blocks.*.cross_attn_ln")
    in $DECODER.attn_ln $DECODER.cross_attn_ln $HF_DECODER.self_attn_layer_norm
    in $HF_DECODER.encoder_attn_layer_norm
attentions_swapped: attention and cross attention have each other's output projection
    weights swap("decoder.blocks.*.attn.out", "decoder.blocks.*.cross_attn.out")
    in $DECODER.attn.out $DECODER.cross_attn.out $HF_DECODER.self_attn.out_proj
    in $HF_DECODER.encoder_attn.out_proj
query_key: queries and keys are swapped, and the bias stays
    weights swap("*.blocks.*.attn.query", "*.blocks.*.attn.key")
    in $ENCODER.attn.query $ENCODER.attn.key $HF_ENCODER.self_attn.[qk]_proj $DECODER.attn.query
    in $DECODER.attn.key $HF_DECODER.self_attn.[qk]_proj
layer_off: a value projection is that of the layer before
    weights copy(*(f"decoder.blocks.{n}.cross_attn.value.weight" for n in (2, 1)))
    in decoder.blocks.2.cross_attn.value model.decoder.layers.2.encoder_attn.v_proj
k_heads: the key heads of cross attention are in another order
    weights each(lambda w: reordered(w, (1, 0, 3, 2)), "decoder.blocks.*.cross_attn.key.weight")
    in $DECODER.cross_attn.key $HF_DECODER.encoder_attn.k_proj
sound_places: sines and cosines of the sound's positions are interleaved
    weights each(sines_and_cosines_in_turn, "encoder.positional_embedding")
    in encoder model.encoder model.encoder.embed_positions
places_off: the embeddings of the positions are one off
    weights each(lambda table: table.roll(1, 0), "decoder.positional_embedding")
    in $TEXT_PLACES
bias_left: a bias is not loaded
    weights each(torch.zeros_like, "decoder.blocks.*.attn.out.bias")
    in $DECODER.attn.out $HF_DECODER.self_attn.out_proj
kernel_flipped: the kernel of a convolution is mirrored
    weights each(lambda kernel: kernel.flip(2), "encoder.conv2.weight")
    in encoder.conv2 model.encoder.conv2
mask_left: the decoder's attention sees all tokens
    - is_causal=mask is not None and n_ctx > 1
    + is_causal=False
    in $DECODER.attn $HF_DECODER.self_attn
heads_split: the heads of the values are split the other way
    - v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
    + v = v.view(*v.shape[:2], -1, self.n_head).permute(0, 3, 1, 2)
    in $ATTENTION
no_residual: the residual is not added after cross attention
    - x = x + self.cross_attn(
    + x = self.cross_attn(
    in $DECODER $HF_DECODER
    golden $HF_DECODER/Tensor.add
no_activation: the first convolution has no activation
    - x = F.gelu(self.conv1(x))
    + x = self.conv1(x)
    in encoder model.encoder
    golden model.encoder/Functional.gelu
silu: the activation is another one
    - Linear(n_state, n_mlp), nn.GELU(), Linear
    + Linear(n_state, n_mlp), nn.SiLU(), Linear
    in $ENCODER.mlp.1 $DECODER.mlp.1 $HF_ENCODER.activation_fn $HF_DECODER.activation_fn
    early
"""
PORTS = tuple(
    ported(
        globals(),
        name,
        "whisper",
        text=text,
        original=hugging_face(
            "WhisperForConditionalGeneration", SETTINGS | {"attn_implementation": attention}
        ),
        golden_work=golden,
        work=mine,
    )
    for name, attention, golden, mine, text in (
        ("whisper", "eager", golden_whole, whole, BUGS),
        ("whisper-decoding", "sdpa", golden_decode, work, IN_TIME),
    )
)
