"""All ports by name. A module that defines ports lists them as ``PORTS``."""

from __future__ import annotations

from ports import engine, gemma, gptlike, layer, litgpt_decoder, meta

MODULES = (layer, engine, meta, gptlike, gemma, litgpt_decoder)
PORTS = {port.name: port for module in MODULES for port in module.PORTS}
