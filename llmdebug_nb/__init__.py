"""llmdebug_nb: record a model, compare two recordings, find the operator that is to blame.

    import llmdebug_nb as ld

    with ld.dump(model, name="golden", tokens="0-3") as golden:
        model.generate(**inputs)
    report = ld.compare(golden, "mine")
    ld.explore(report)

In a notebook: ``%load_ext llmdebug_nb``, then ``%%llmdump``, ``%llmcompare``, ``%llmexplore``
and ``%llmruns``.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from llmdebug_nb.core import collector
from llmdebug_nb.core import errors as errors
from llmdebug_nb.core.errors import LLMDebugError as LLMDebugError
from llmdebug_nb.notebook import formatters

__version__ = "0.1.0"

# resolved at first use: `import llmdebug_nb` loads neither torch nor a notebook package
_HOMES = {
    "Report": "app.report",
    "Run": "store.run",
    "check_ranks": "app.rank_check",
    "compare": "app.compare",
    "copy_run": "app.copying",
    "delete_run": "app.runs",
    "doctor": "app.doctor.check",
    "dump": "app.recording",
    "errcheck": "app.errcheck",
    "explore": "notebook.explore",
    "export": "app.export",
    "export_dump": "app.convert",
    "fx_backend": "app.torch_compile",
    "inductor_backend": "app.torch_compile",
    "launch": "app.launching.program",
    "lockstep": "app.lockstep.lockstep",
    "lockstep_peer": "app.lockstep.peer",
    "logits": "app.logits.check",
    "opcheck": "app.opcheck.check",
    "open_run": "app.runs",
    "perturb": "app.perturbing.perturb",
    "redact_run": "app.runs",
    "reduce_run": "app.runs",
    "runs": "app.runs",
    "seed_all": "core.determinism",
    "step": "app.stepping",
    "timeline": "app.tables",
    "to_onnx": "app.topology",
    "topology": "app.topology",
    "write_tables": "app.tables",
    "write_topology": "app.topology",
}
# names of 0.1 that moved; they keep working, with a DeprecationWarning, until 0.2
_MOVED = {
    "CaptureError": "core.errors",
    "CompareError": "core.errors",
    "CorruptDumpError": "core.errors",
    "DumpConfig": "msit",
    "DumpOptions": "core.options",
    "DumpWriteError": "core.errors",
    "EmptyDumpError": "core.errors",
    "MissingPackageError": "core.errors",
    "NotADumpError": "core.errors",
    "OptionError": "core.errors",
    "PrecisionDebugger": "msprobe",
    "StoreError": "core.errors",
    "TensorLookupError": "core.errors",
    "Topology": "store.topology.document",
    "UnknownRunError": "core.errors",
    "atb_json_to_onnx": "msit",
    "convert": "torchair",
    "get_fx_dump_config": "torchair",
    "get_ge_dump_config": "torchair",
    "ort_kernels": "app.tables",
    "register_hook": "msit",
}
__all__ = ["LLMDebugError", "errors", *_HOMES]  # noqa: PLE0604

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from llmdebug_nb.app.compare import compare as compare
    from llmdebug_nb.app.convert import export_dump as export_dump
    from llmdebug_nb.app.copying import copy_run as copy_run
    from llmdebug_nb.app.doctor.check import doctor as doctor
    from llmdebug_nb.app.errcheck import errcheck as errcheck
    from llmdebug_nb.app.export import export as export
    from llmdebug_nb.app.launching.program import launch as launch
    from llmdebug_nb.app.lockstep.lockstep import lockstep as lockstep
    from llmdebug_nb.app.lockstep.peer import lockstep_peer as lockstep_peer
    from llmdebug_nb.app.logits.check import logits as logits
    from llmdebug_nb.app.opcheck.check import opcheck as opcheck
    from llmdebug_nb.app.perturbing.perturb import perturb as perturb
    from llmdebug_nb.app.rank_check import check_ranks as check_ranks
    from llmdebug_nb.app.recording import dump as dump
    from llmdebug_nb.app.report import Report as Report
    from llmdebug_nb.app.runs import delete_run as delete_run
    from llmdebug_nb.app.runs import open_run as open_run
    from llmdebug_nb.app.runs import redact_run as redact_run
    from llmdebug_nb.app.runs import reduce_run as reduce_run
    from llmdebug_nb.app.runs import runs as runs
    from llmdebug_nb.app.stepping import step as step
    from llmdebug_nb.app.tables import timeline as timeline
    from llmdebug_nb.app.tables import write_tables as write_tables
    from llmdebug_nb.app.topology import to_onnx as to_onnx
    from llmdebug_nb.app.topology import topology as topology
    from llmdebug_nb.app.topology import write_topology as write_topology
    from llmdebug_nb.app.torch_compile import fx_backend as fx_backend
    from llmdebug_nb.app.torch_compile import inductor_backend as inductor_backend
    from llmdebug_nb.core.determinism import seed_all as seed_all
    from llmdebug_nb.notebook.explore import explore as explore
    from llmdebug_nb.store.run import Run as Run


def __getattr__(name: str) -> object:
    home = _HOMES.get(name) or _MOVED.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collector.paused():  # it would go through all that the program has made
        value = getattr(import_module(f"{__name__}.{home}"), name)
    if name in _HOMES:
        globals()[name] = value
    else:
        where = "llmdebug_nb.errors" if home == "core.errors" else f"llmdebug_nb.{home}"
        warnings.warn(
            f"llmdebug_nb.{name} is now {where}.{name}; the old name goes in 0.2",
            DeprecationWarning,
            stacklevel=2,
        )
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


formatters.register_in_running_shell()


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics: ``%load_ext llmdebug_nb``."""
    from llmdebug_nb.notebook.extension import register

    register(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the magics back: ``%unload_ext llmdebug_nb``."""
    from llmdebug_nb.notebook.extension import unregister

    unregister(shell)
