"""All ports by name. A module that defines ports lists them as ``PORTS``."""

from __future__ import annotations

from importlib import import_module

from ports.entry import Port

MODULES = (
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
PORTS: dict[str, Port] = {
    port.name: port for name in MODULES for port in import_module(f"ports.{name}").PORTS
}
