"""All ports by name, in five sets. A module that defines ports lists them as ``PORTS``."""

from __future__ import annotations

from importlib import import_module

from ports.entry import Port

SETS_OF_MODULES = {
    # the ports that the comparison was made with
    "known": "layer engine meta gptlike gemma experts int8 shards batched litgpt_decoder"
    " open_clip_text vllm_engine",
    # Written without a look at the comparison, and not to be looked at while it is changed: they
    # say how it does on code that it has not seen. Scores of single cases would give that away.
    "held-out": "torchtune_decoders x_transformers_decoder whisper_model esm_encoder bert_encoder"
    " mamba_decoder curated_decoders curated_encoder",
    # Written after the held-out ones had been used for a while, and held out in their place.
    "fresh": "lens_decoders latent flat_moe text_to_text timm_vision rwkv_decoder keras_llama"
    " small_gpt time_first",
    # Written after the fresh ones had been used, without a look at the comparison, and held out
    # until they were scored once.
    "newest": "command bloom disentangled dispatch",
    # Written later in the same way.
    "latest": "sinks glm translator alibi",
}


def _named(modules: str) -> dict[str, Port]:
    imported = (import_module(f"ports.{name}") for name in modules.split())
    return {port.name: port for module in imported for port in module.PORTS}


SETS: dict[str, dict[str, Port]] = {
    name: _named(modules) for name, modules in SETS_OF_MODULES.items()
}
PORTS: dict[str, Port] = {name: port for ports in SETS.values() for name, port in ports.items()}
