"""`register_hook`: recording a model by a `DumpConfig`, as msit users know it."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from llmdebug_nb.app.live_models import modules_in
from llmdebug_nb.app.recording import Recording
from llmdebug_nb.app.upstream.dump_config import OPTION_NAMES, DumpConfig
from llmdebug_nb.app.upstream.option_names import named_as
from llmdebug_nb.core import determinism
from llmdebug_nb.core.errors import OptionError, StoreError, saving
from llmdebug_nb.core.places import shown
from llmdebug_nb.core.records import Record
from llmdebug_nb.store.layouts.msit import ANALYSIS, ANALYSIS_COLUMNS, analysis_row
from llmdebug_nb.store.own_file import PRIVATE_FILE
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    from torch import nn


def register_hook(
    model: nn.Module, config: DumpConfig | None = None, hook_type: str = "dump_data"
) -> Recording:
    """Start recording; ``stop()``, ``remove()`` or the end of the process ends it.

    Any number of configs and registrations may exist at the same time. ``hook_type``:
    ``dump_data``, the only one that msit has.

    Raises:
        OptionError: ``model`` is not a module, ``config`` is not a DumpConfig, or another
            ``hook_type``.
        EmptyDumpError: the filters match nothing.
    """
    if not modules_in(model):
        raise OptionError(
            f"register_hook(model, config): expected a torch.nn.Module, got {model!r}"
        )
    if config is not None and not isinstance(config, DumpConfig):
        raise OptionError(
            f"register_hook(model, config): expected a DumpConfig, got {type(config).__name__}"
        )
    if hook_type != "dump_data":
        raise OptionError(f"hook_type {hook_type!r} is not known; known: dump_data")
    recording = Registered(model, config or DumpConfig())
    if recording.elsewhere is None:
        recording.start()
    else:
        warnings.warn(recording.elsewhere, stacklevel=2)
    return recording


class Registered(Recording):
    """A recording with msit's interface. ``elsewhere``: why this process records nothing."""

    def __init__(self, model: nn.Module, config: DumpConfig) -> None:
        super().__init__(model, config.options)
        self._analyze = config.analyze
        device = _device_index(modules_in(model)[-1])
        self.elsewhere = None
        if config.device_id is not None and device not in (None, config.device_id):
            self.elsewhere = (
                f"device_id={config.device_id}: this process runs on device {device}"
                " and records nothing"
            )

    def start(self) -> Run:
        """Hook the model and begin. Errors name the parameters of `DumpConfig`."""
        with named_as(OPTION_NAMES):
            return super().start()

    # None is msit's answer in a process that records nothing
    def stop(self, ended_by: str | None = None) -> Run | None:  # type: ignore[override]
        """Finish the run and, with ``analyze``, its csv file.

        In a process that records nothing: warn, and return None.
        """
        if self.elsewhere is not None and not self.running:
            warnings.warn(f"there is nothing to stop: {self.elsewhere}", stacklevel=2)
            return None
        with named_as(OPTION_NAMES):
            run = super().stop(ended_by)
        if self._analyze:
            write_analysis(run)
        return run

    remove = stop  # type: ignore[assignment]

    def _seed(self) -> determinism.Switched:
        seed = self.options.seed
        return determinism.Switched() if seed is None else determinism.seed_all(seed, mode=True)


def write_analysis(run: Run) -> Path:
    """Write ``tensor_analyze.csv`` into a run's folder and return its path.

    It has msit's columns and one row per tensor. The variance is a sample's (`torch.var`),
    computed from the recorded norm and mean. ``Tensor Path`` is an expression that loads the
    tensor, empty where only statistics were kept.

    Raises:
        StoreError: the file can't be written.
    """
    if run.path is None:
        raise StoreError(f"run {run.name!r} has no folder for tensor_analyze.csv")
    path, last = run.path / ANALYSIS, -1
    with saving(path), open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        path.chmod(PRIVATE_FILE)
        table.writerow(ANALYSIS_COLUMNS)
        while page := list(run.records(after=last, n=1000)):
            table.writerows(analysis_row(record, _expression(run, record)) for record in page)
            last = page[-1].id
    return path


def _expression(run: Run, record: Record) -> str:
    """Return Python code that loads a tensor; "" where its values were not kept."""
    if record.payload is None:
        return ""
    names = ("step", "role", "slot", "call", "generation", "rank", "phase")
    where = ", ".join(f"{name}={getattr(record.site, name)!r}" for name in names)
    return f"ld.open_run({shown(str(run.path))!r}).tensor({record.site.path!r}, {where})"


def _device_index(model: nn.Module) -> int | None:
    devices = [parameter.device for parameter in model.parameters()]
    return None if not devices or devices[-1].type == "cpu" else devices[-1].index
