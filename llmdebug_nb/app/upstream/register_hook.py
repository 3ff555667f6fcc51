"""The same capture in the form that msit users know: `DumpConfig` and `register_hook`."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

from llmdebug_nb.app.live_models import modules_in
from llmdebug_nb.app.recording import Recording
from llmdebug_nb.app.upstream.dump_config import DumpConfig
from llmdebug_nb.core import determinism
from llmdebug_nb.core.errors import OptionError, StoreError
from llmdebug_nb.core.records import Record
from llmdebug_nb.store.run import Run


def register_hook(model: Any, config: DumpConfig | None = None) -> Recording:
    """Start recording in the form that msit users know; ``stop()`` (or ``remove()``, or process exit) ends it.

    Any number of configs and registrations may live side by side.

    Raises:
        OptionError: ``model`` is no module, or ``config`` no DumpConfig.
    """
    if not modules_in(model):
        raise OptionError(
            f"register_hook(model, config): expected a torch.nn.Module, got {model!r}"
        )
    if config is not None and not isinstance(config, DumpConfig):
        raise OptionError(
            f"register_hook(model, config): expected a DumpConfig, got {type(config).__name__}"
        )
    recording = Registered(model, config or DumpConfig())
    if recording.elsewhere is None:
        recording.start()
    else:
        warnings.warn(recording.elsewhere, stacklevel=2)
    return recording


class Registered(Recording):
    """A recording with what msit does around one. ``elsewhere``: why this process records nothing, or None."""

    def __init__(self, model: Any, config: DumpConfig) -> None:
        super().__init__(model, config.options)
        self._analyze = config.analyze
        device = _device_index(self._models[-1])
        self.elsewhere = (
            f"device_id={config.device_id}: this process runs on device {device} and records nothing"
            if config.device_id is not None and device not in (None, config.device_id)
            else None
        )

    def stop(self, ended_by: str | None = None) -> Any:
        """Finish the dump, and with ``analyze`` its csv; of a process that records nothing, say so and return None."""
        if self.elsewhere is not None and not self.running:
            warnings.warn(f"there is nothing to stop: {self.elsewhere}", stacklevel=2)
            return None
        run = super().stop(ended_by)
        if self._analyze:
            write_analysis(run)
        return run

    remove = stop

    def _seed(self) -> determinism.Switched:
        seed = self.options.seed
        return determinism.Switched() if seed is None else determinism.seed_all(seed, mode=True)


def write_analysis(run: Run) -> Path:
    """Write ``tensor_analyze.csv`` into a run's folder, with msit's columns, one row a tensor; return its path.

    The variance is that of `torch.var` (a sample's), from the recorded norm and mean. ``Tensor Path`` is the expression
    that reads the tensor back, empty where only statistics were kept. Raises StoreError where it can't be written.
    """
    if run.path is None:
        raise StoreError(f"run {run.name!r} has no folder for tensor_analyze.csv")
    path, last = run.path / "tensor_analyze.csv", -1
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(_ANALYSIS)
            while page := list(run.records(after=last, n=1000)):
                table.writerows(_analysis_row(run, record) for record in page)
                last = page[-1].id
    except OSError as error:
        raise StoreError(f"can't write {path}: {error.strerror or error}") from None
    return path


_ANALYSIS = (
    "Node Name",
    "Node Type",
    "Tensor Path",
    "dtype",
    "shape",
    "max",
    "min",
    "variance",
    "mean",
)


def _analysis_row(run: Run, record: Record) -> tuple[Any, ...]:
    s, v, n = record.site, record.summary, record.summary.numel
    names = ("step", "role", "slot", "call", "generation", "rank", "phase")
    where = ", ".join(f"{name}={getattr(s, name)!r}" for name in names)
    variance = None
    if v.l2norm is not None and v.mean is not None and n > 1:
        variance = max(v.l2norm * v.l2norm - n * v.mean * v.mean, 0.0) / (n - 1)
    return (
        f"root.{s.path}" if s.path else "root",
        record.op,
        ""
        if record.payload is None
        else f"ld.open_run({str(run.path)!r}).tensor({s.path!r}, {where})",
        f"torch.{v.dtype}",
        f"torch.Size({list(v.shape)})",
        v.max,
        v.min,
        variance,
        v.mean,
    )


def _device_index(model: Any) -> Any:
    devices = [parameter.device for parameter in model.parameters()]
    return None if not devices or devices[-1].type == "cpu" else devices[-1].index
