"""What of this installation works on this machine, and what is missing: ``doctor --self``."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from llmdebug_nb.capture.runtimes import RUNTIMES
from llmdebug_nb.core.options import runs_folder
from llmdebug_nb.core.setups import Part
from llmdebug_nb.show.words import size_text

_LITTLE = 2 << 30  # bytes: what `launch` wants to be free
_EXTRAS = {
    "transformers": "generate is followed token by token; tokenizers on the command line",
    **{each.package: f"models of {each.name} are recorded" for each in RUNTIMES if each.extra},
    "onnx": "topologies are written as ONNX",
    "matplotlib": "pictures",
    "safetensors": "checkpoints and files of safetensors are read",
    "gguf": "GGUF files are compared with their checkpoint",
    "pyarrow": "tables for Arrow",
    "dask": "large tables, lazily",
    "fsspec": "dumps that lie elsewhere",
    "triton": "kernels that Inductor writes for GPUs",
}
_EXTENSION = "share/jupyter/labextensions/llmdebug-nb"


def parts() -> tuple[Part, ...]:
    """Return each part, and whether it works."""
    return (*_needed(), *_extras(), *_front_end(), *_places())


def _needed() -> Iterator[Part]:
    import torch

    from llmdebug_nb.core.kernels import native

    yield Part("Python", True, sys.version.partition(" ")[0])
    yield Part("torch", True, torch.__version__)
    why = native.why_not()
    do = "install a C compiler, and llmdebug_nb again; statistics are slower without it"
    yield Part("C kernel", None if why else True, why or "used", do if why else "")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Part("accelerator", True if count else None, f"{count} devices" if count else "none")


def _extras() -> Iterator[Part]:
    for name, use in _EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            yield Part(name, None, f"not installed; with it: {use}", f"pip install {name}")
        else:
            yield Part(name, True, _version(name))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "installed"


def _front_end() -> Iterator[Part]:
    from llmdebug_nb.show.bundle import FrontEndMissingError, bundle

    try:
        bundle()
    except FrontEndMissingError as error:
        yield Part("explorer", False, str(error), "install a wheel, or run make in a checkout")
    else:
        yield Part("explorer", True, "built")
    places = [Path(sys.prefix), Path.home() / ".local"]
    found = any((place / _EXTENSION).is_dir() for place in places)
    do = "pip install llmdebug_nb into the environment of JupyterLab, and restart it"
    says = "installed" if found else "not in this environment: the sidebar is missing"
    yield Part("JupyterLab extension", True if found else None, says, "" if found else do)


def _places() -> Iterator[Part]:
    folder = runs_folder()
    there = next((p for p in (folder.absolute(), *folder.absolute().parents) if p.exists()), None)
    writable = there is not None and os.access(there, os.W_OK)
    says = f"{'can' if writable else 'can not'} be written: {folder}"
    yield Part("folder of runs", writable, says, "" if writable else "set LLMDEBUG_RUNS")
    if there is not None:
        free = shutil.disk_usage(there).free
        enough = free >= _LITTLE
        do = "" if enough else "delete runs (%llmruns --delete), or set LLMDEBUG_RUNS"
        yield Part("disk", enough, f"{size_text(free)} free", do)
