"""Reaches processes of vLLM that our hook does not, such as those of an isolated Python.

vLLM calls the entry points of `vllm.general_plugins` in each of its processes, engine core and
workers, too: https://docs.vllm.ai/en/stable/design/plugin_system.html
"""

from __future__ import annotations

import os
import sys


def register() -> None:
    """Prepare recording in a process of a launched program; do nothing in any other one."""
    if not os.environ.get("LLMDEBUG_LAUNCH"):
        return
    try:
        from llmdebug_nb.app.launching import child

        child.begin("torch")
    except Exception as error:  # the engine goes on
        sys.stderr.write(f"llmdebug: this engine is not recorded: {error}\n")
