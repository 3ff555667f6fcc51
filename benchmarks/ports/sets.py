"""All ports by name, in two sets. A module that defines ports lists them as ``PORTS``."""

from __future__ import annotations

from importlib import import_module

from ports.entry import Port

# the ports that the comparison was made with
KNOWN = (
    "layer",
    "engine",
    "meta",
    "gptlike",
    "gemma",
    "experts",
    "int8",
    "shards",
    "batched",
    "litgpt_decoder",
    "open_clip_text",
    "vllm_engine",
)
# Written without a look at the comparison, and not to be looked at while it is changed: they say
# how it does on code that it has not seen. Scores of single cases would give that away.
HELD_OUT = (
    "torchtune_decoders",
    "x_transformers_decoder",
    "whisper_model",
    "esm_encoder",
    "bert_encoder",
    "mamba_decoder",
    "curated_decoders",
    "curated_encoder",
)


def _named(modules: tuple[str, ...]) -> dict[str, Port]:
    return {port.name: port for name in modules for port in import_module(f"ports.{name}").PORTS}


SETS: dict[str, dict[str, Port]] = {"known": _named(KNOWN), "held-out": _named(HELD_OUT)}
PORTS: dict[str, Port] = {**SETS["known"], **SETS["held-out"]}
