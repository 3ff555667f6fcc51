"""The versions that affect numbers, of what a program has imported."""

from __future__ import annotations

import platform
import sys

import torch

from llmdebug_nb.capture.runtimes import RUNTIMES

_PACKAGES = (
    "transformers", "tokenizers", "numpy", "accelerate", *(each.package for each in RUNTIMES),
    "triton", "flash_attn", "peft", "torchao", "bitsandbytes",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return versions that affect numerics; nothing that names a machine or a person."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }
    for name in _PACKAGES:
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", ""))
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found
