"""llmdebug_nb: record what a model computed, compare two recordings, find the op that is to blame.

    import llmdebug_nb as ld

    with ld.dump(model, name="golden", tokens="0-3") as golden:
        model.generate(**inputs)
    report = ld.compare(golden, "mine")
    ld.explore(report)

In a notebook: ``%load_ext llmdebug_nb``, then ``%%llmdump``, ``%llmcompare``, ``%llmexplore``, ``%llmruns``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# resolved at first use: `import llmdebug_nb` loads neither torch nor a notebook package
_HOMES = {
    "CaptureError": "errors",
    "CompareError": "errors",
    "CorruptDumpError": "errors",
    "DumpConfig": "msit_config",
    "DumpOptions": "options",
    "DumpWriteError": "errors",
    "EmptyDumpError": "errors",
    "LLMDebugError": "errors",
    "MissingPackageError": "errors",
    "NotADumpError": "errors",
    "OptionError": "errors",
    "PrecisionDebugger": "debugger",
    "Report": "report",
    "Run": "store.run",
    "StoreError": "errors",
    "TensorLookupError": "errors",
    "Topology": "topologies.document",
    "UnknownRunError": "errors",
    "atb_json_to_onnx": "wiring",
    "compare": "api",
    "convert": "api",
    "delete_run": "api",
    "dump": "api",
    "explore": "notebook.explore",
    "export": "api",
    "fx_backend": "compiled",
    "get_fx_dump_config": "compiled",
    "get_ge_dump_config": "compiled",
    "inductor_backend": "compiled",
    "launch": "launching.program",
    "open_run": "api",
    "ort_kernels": "api",
    "reduce_run": "api",
    "register_hook": "msit",
    "runs": "api",
    "seed_all": "determinism",
    "step": "stepping",
    "timeline": "api",
    "to_onnx": "wiring",
    "topology": "wiring",
    "write_tables": "api",
    "write_topology": "wiring",
}
__all__ = [
    "CaptureError",
    "CompareError",
    "CorruptDumpError",
    "DumpConfig",
    "DumpOptions",
    "DumpWriteError",
    "EmptyDumpError",
    "LLMDebugError",
    "MissingPackageError",
    "NotADumpError",
    "OptionError",
    "PrecisionDebugger",
    "Report",
    "Run",
    "StoreError",
    "TensorLookupError",
    "Topology",
    "UnknownRunError",
    "atb_json_to_onnx",
    "compare",
    "convert",
    "delete_run",
    "dump",
    "explore",
    "export",
    "fx_backend",
    "get_fx_dump_config",
    "get_ge_dump_config",
    "inductor_backend",
    "launch",
    "open_run",
    "ort_kernels",
    "reduce_run",
    "register_hook",
    "runs",
    "seed_all",
    "step",
    "timeline",
    "to_onnx",
    "topology",
    "write_tables",
    "write_topology",
]

if TYPE_CHECKING:
    from llmdebug_nb.api import compare as compare
    from llmdebug_nb.api import convert as convert
    from llmdebug_nb.api import delete_run as delete_run
    from llmdebug_nb.api import dump as dump
    from llmdebug_nb.api import export as export
    from llmdebug_nb.api import open_run as open_run
    from llmdebug_nb.api import ort_kernels as ort_kernels
    from llmdebug_nb.api import reduce_run as reduce_run
    from llmdebug_nb.api import runs as runs
    from llmdebug_nb.api import timeline as timeline
    from llmdebug_nb.api import write_tables as write_tables
    from llmdebug_nb.compiled import fx_backend as fx_backend
    from llmdebug_nb.compiled import get_fx_dump_config as get_fx_dump_config
    from llmdebug_nb.compiled import get_ge_dump_config as get_ge_dump_config
    from llmdebug_nb.compiled import inductor_backend as inductor_backend
    from llmdebug_nb.debugger import PrecisionDebugger as PrecisionDebugger
    from llmdebug_nb.determinism import seed_all as seed_all
    from llmdebug_nb.errors import CaptureError as CaptureError
    from llmdebug_nb.errors import CompareError as CompareError
    from llmdebug_nb.errors import CorruptDumpError as CorruptDumpError
    from llmdebug_nb.errors import DumpWriteError as DumpWriteError
    from llmdebug_nb.errors import EmptyDumpError as EmptyDumpError
    from llmdebug_nb.errors import LLMDebugError as LLMDebugError
    from llmdebug_nb.errors import MissingPackageError as MissingPackageError
    from llmdebug_nb.errors import NotADumpError as NotADumpError
    from llmdebug_nb.errors import OptionError as OptionError
    from llmdebug_nb.errors import StoreError as StoreError
    from llmdebug_nb.errors import TensorLookupError as TensorLookupError
    from llmdebug_nb.errors import UnknownRunError as UnknownRunError
    from llmdebug_nb.launching.program import launch as launch
    from llmdebug_nb.msit import register_hook as register_hook
    from llmdebug_nb.msit_config import DumpConfig as DumpConfig
    from llmdebug_nb.notebook.explore import explore as explore
    from llmdebug_nb.options import DumpOptions as DumpOptions
    from llmdebug_nb.report import Report as Report
    from llmdebug_nb.stepping import step as step
    from llmdebug_nb.store.run import Run as Run
    from llmdebug_nb.topologies.document import Topology as Topology
    from llmdebug_nb.wiring import atb_json_to_onnx as atb_json_to_onnx
    from llmdebug_nb.wiring import to_onnx as to_onnx
    from llmdebug_nb.wiring import topology as topology
    from llmdebug_nb.wiring import write_topology as write_topology


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """Register the magics: ``%load_ext llmdebug_nb``."""
    from llmdebug_nb.notebook.magics import register

    register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics back: ``%unload_ext llmdebug_nb``."""
    from llmdebug_nb.notebook.magics import unregister

    unregister(shell)
