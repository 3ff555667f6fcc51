"""Ports made of what their modules define."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ports import packages
from ports.bugs import bugs
from ports.entry import Port
from ports.steps import decode, run
from ports.weights import hugging_face, llama_norms, renamed

CODE = Path(__file__).parent / "code"
PARTS = ("source", "original", "make", "convert", "golden_work", "work", "norms", "prepare")
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,  # attention is not uniform then
    "attn_implementation": "eager",
}
SMALLER = SMALL | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}


def made(module: dict[str, Any], name: str, kind: str = "", text: str = "", **more: Any) -> Port:
    """Return the port of a module, given by its names.

    What is not in ``more`` is the module's, under the name of the port's field, or else as usual.
    ``NAMES`` stand for ``convert``. ``kind``: of the original, if it is made of ``SETTINGS`` alone.
    ``text``: the bugs, if not ``BUGS``.
    """
    given: dict[str, Any] = {"golden_work": decode, "norms": llama_norms}
    if "NAMES" in module:
        given["convert"] = lambda hf: renamed(hf.state_dict(), module["NAMES"])
    if kind:
        given["original"] = hugging_face(kind, module["SETTINGS"])
    given |= {part: module[part] for part in PARTS if part in module}
    return Port(**{"name": name, "bugs": bugs(text or module["BUGS"], module), **given, **more})


def written(
    module: dict[str, Any], name: str, model: str, kind: str = "", file: str = "", **more: Any
) -> Port:
    """Return a port of our own, in ``code/{file}.py``, by default that of its name.

    It was written without a look at the alignment. ``model``: its class, made from the original's
    configuration. ``run(model, ids, prompt)`` of the code is the port's own loop over the steps.
    """
    more.setdefault("work", module.get("work", run))
    return made(
        module,
        name,
        kind,
        source=CODE / f"{file or name}.py",
        make=lambda code, hf, **settings: getattr(code, model)(hf.config, **settings),
        **more,
    )


def ported(module: dict[str, Any], name: str, package: str, /, *needed: str, **more: Any) -> Port:
    """Return a port whose code is that of a package. ``needed``: other packages that it needs.

    ``package`` in ``more``: that of which the code is made a module, if another one or none.
    """
    why = partial(packages.missing, package, *needed)
    return made(module, name, **{"package": package, "missing": why, **more})
