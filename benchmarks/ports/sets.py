"""All ports by name. A module that defines ports lists them as ``PORTS``."""

from __future__ import annotations

from ports import engine, experts, gemma, gptlike, int8, layer, litgpt_decoder, meta

MODULES = (layer, engine, meta, gptlike, gemma, experts, int8, litgpt_decoder)
PORTS = {port.name: port for module in MODULES for port in module.PORTS}
