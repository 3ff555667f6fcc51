"""The use cases.

dump                   CAPTURED -> DESCRIBED -> STORED
open_run               LOADED
compare                ALIGNED -> COMPARED -> EXPLAINED
export                 SHOWN, as a file
runs, delete_run       what is there
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdebug_nb.align import names
from llmdebug_nb.align.names import Names
from llmdebug_nb.align.pairing import pair
from llmdebug_nb.app.recording import Recording, finder, recorded
from llmdebug_nb.app.report import Report, write_text
from llmdebug_nb.capture.timing import ort_profile
from llmdebug_nb.comparison import engine
from llmdebug_nb.comparison.custom import Custom
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.tolerance import Calibration, says
from llmdebug_nb.core.errors import CompareError, OptionError, StoreError, UnknownRunError
from llmdebug_nb.core.findings import Difference, Finding, Pair
from llmdebug_nb.core.kernels import partial
from llmdebug_nb.core.options import CompareOptions, DumpOptions, runs_folder
from llmdebug_nb.explain import blame
from llmdebug_nb.explain.runs import Runs, Side
from llmdebug_nb.show import export as exporting
from llmdebug_nb.show import html
from llmdebug_nb.show import timeline as timelines
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.show.state import state_of
from llmdebug_nb.show.timeline import Timeline
from llmdebug_nb.show.words import count_text, size_text
from llmdebug_nb.store import catalog, compiled, profile, reader, reduce, tables
from llmdebug_nb.store.layouts import torchair
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import pandas

__all__ = ["Recording", "compare", "delete_run", "dump", "export", "open_run", "runs"]

_COMPARE = CompareOptions()


def dump(model: Any = None, **options: Any) -> Recording:
    """Record what a model computes in a ``with`` block; the block's target is the Run.

    ``model`` None records the outermost module(s) that run. Options: see `DumpOptions`.

        with ld.dump(model, name="golden", tokens="0-3") as golden:
            model.generate(**inputs)

    Raises:
        OptionError: an option that makes no sense, or is unknown.
        EmptyDumpError: a filter that matches nothing, or a block that ran nothing asked for.
        DumpWriteError: a place that can't be written to.
    """
    return Recording(model, DumpOptions.of(**options))


def open_run(where: str | os.PathLike[str] | Run) -> Run:
    """Open a dump by name (of this process, or in the runs folder), path, or foreign dump folder.

    Raises:
        UnknownRunError, NotADumpError, CorruptDumpError: each says what was seen and what to do.
    """
    here = recorded.get(where) if isinstance(where, str) else None
    if not isinstance(where, str) or here is None or not catalog.is_run(here):
        return reader.open_run(where)
    try:
        elsewhere = catalog.find(where)
    except UnknownRunError:
        return reader.native(here)
    return reader.native(max((here, elsewhere), key=catalog.recorded_at))


def runs() -> list[Run]:
    """Return the runs that can be opened by name, oldest first; damaged ones are left out with a warning."""
    folders = [*catalog.runs_in(runs_folder()), *recorded.values()]
    found = []
    for folder in dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()):
        try:
            run = reader.native(folder)
            run.source  # noqa: B018 - opens it
            found.append(run)
        except StoreError as error:
            warnings.warn(str(error), stacklevel=2)
    return found


def delete_run(where: str | os.PathLike[str] | Run) -> Path:
    """Delete a native run's folder and return its path. Raises UnknownRunError, OptionError."""
    run = open_run(where)
    if run.path is None or not run.path.exists():
        raise UnknownRunError(f"run {run.name!r} is already gone")
    if not catalog.is_run(run.path):
        raise OptionError(f"{run.path} was not recorded by llmdebug_nb; delete it yourself")
    shutil.rmtree(run.path)
    for name in [name for name, folder in recorded.items() if folder == run.path]:
        del recorded[name]
    return run.path


def reduce_run(
    where: str | os.PathLike[str] | Run,
    to: str = "minmax",
    name: str | None = None,
    replace: bool = False,
) -> Run:
    """Keep figures of each tensor of a run in place of its values: ``minmax``, or ``quantile:N``; return the new run.

    It is called ``name``, by default that of the old one with ``.minmax`` or ``.quantile`` behind it, and lies beside it. ``replace`` puts it
    in the place of the old one, which is removed once the new one is on the disk as a whole. Statistics, calls and operators are all kept.

    Raises:
        OptionError: another ``to``, or a run of another tool. UnknownRunError, CorruptDumpError: as `open_run`.
        DumpWriteError: there is no room; the old run is as it was.
    """
    if name is not None and replace:
        raise OptionError(f"name {name!r}: with replace, the run keeps its name")
    options = DumpOptions(name=name or "run", reduce=to)
    run, kept = open_run(where), str(options.reduce)
    if run.path is None or not catalog.is_run(run.path):
        raise OptionError(
            f"{run.label} was not recorded by llmdebug_nb: only its own runs can be reduced"
        )
    count = int(kept.partition(":")[2] or 0)
    figures = functools.partial(partial.quantiles, count=count) if count else partial.minmax
    says = f"quantile[{count}]" if count else kept
    with _progress("reduce", len(run)) as told:
        new = reduce.reduced(
            run.path,
            run.path.parent,
            name or f"{run.name}.{kept.partition(':')[0]}",
            says,
            figures,
            told,
        )
    return reader.native(reduce.replace(run.path, new) if replace else new)


def convert(
    where: str | os.PathLike[str] | Run, folder: str | os.PathLike[str], to: str = "fx"
) -> torchair.Written:
    """Write a run of compiled code in the folders of torchair's dumps, for tools that read those; say what was written.

    ``to``: ``fx``, ``fx-old`` (the layout of PTA up to 7.1) or ``ge``. What can't be written is counted.

    Raises:
        OptionError: another layout, or a run that is not of compiled code. StoreError: the folder is not empty or can't be written to,
        or nothing of the run can be written there.
    """
    if to not in torchair.LAYOUTS:
        raise OptionError(f"to {to!r} is not known; known: {', '.join(torchair.LAYOUTS)}")
    run = open_run(where)
    if not compiled.is_compiled(run):
        raise OptionError(
            f"{run.label} is not of compiled code: record it with graph='fx' or 'fused'"
        )
    names, begun = compiled.names(run), float(run.meta.get("created") or 0.0)
    root = next((node.type for node in run.nodes if not node.path), "model")
    named = lambda record: names.get(compiled.key_of(record.site))  # noqa: E731
    return torchair.write(run.records(), run.load, named, Path(folder), to, root, begun)


def write_tables(where: str | os.PathLike[str] | Run, folder: str | os.PathLike[str]) -> list[Path]:
    """Write what a run knows of operators, kernels and host times as csv files, in the folders and columns of msit's dumps; return them.

    Raises:
        StoreError: the run has no such tables, or the folder can't be written to; and those of `open_run`.
    """
    return tables.write_tables(open_run(where), Path(folder))


def timeline(
    where: str | os.PathLike[str] | Run, step: int | None = None, generation: int = 0
) -> Timeline:
    """Return what ran when in one step of a run that was recorded with ``profile``: the first one, if none is named.

    As the value of a cell it is a picture and two tables, ``save(path)`` writes the picture, and ``print`` gives text.

    Raises:
        TensorLookupError: the run has no times of that step. UnknownRunError, CorruptDumpError: as `open_run`.
    """
    return timelines.timeline(open_run(where), step, generation)


def ort_kernels(path: str | os.PathLike[str]) -> pandas.DataFrame:
    """Read the profile that ONNX Runtime wrote (``SessionOptions.enable_profiling``): a row a node that ran, with the columns of `Run.kernels`.

    ``step`` is the number of the `run` call. Raises CorruptDumpError.
    """
    return profile.kernel_frame(ort_profile.launches(path))


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Show a bar when it takes a while; gives what is told of progress."""
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=what, unit="tensor", delay=1, leave=False) as bar:
        yield bar.update


def compare(
    golden: Any, mine: Any, explain: bool = _COMPARE.explain, *, mapping: Any = _COMPARE.mapping,
    limits: Any = _COMPARE.limits, calibrate: Any = _COMPARE.calibrate, metrics: Any = _COMPARE.metrics,
    model: Any = None, progress: bool = _COMPARE.progress,
) -> Report:  # fmt: skip
    """Compare two runs (or names, or paths): verdict, differences in execution order, what is to blame.

    ``explain`` False skips the search for blame. ``mapping`` says which module of golden is which of mine, where that
    isn't found: a dict, or a YAML or JSON file, see `align.names.read`. ``limits``: fixed limits in place of those that
    noise explains, by path and dtype:
    ``{"model.layers.*": {"cosine": 0.999}, "lm_head": {"bfloat16": {"max_abs": 0.1}}}``, or a YAML or JSON file of that.
    ``calibrate``: another recording of golden (or several), perturbed, in another precision, with other kernels, or
    simply once more: three times what it differs from golden by is noise. ``metrics``: callables ``(golden, mine) -> float`` of two CPU
    tensors, or a dict of them by name. ``model``: that of ``mine``, whose modules are
    called alone on golden's inputs; left out, it is the one that was recorded, if that was in this process and still
    exists. It is left as it was. ``progress`` shows a bar when it takes more than a second.
    What was marked as expected of runs of these names before counts (`Report.expect`), and the report says so.

    Raises:
        UnknownRunError and other StoreErrors: a run can't be opened.
        OptionError: a mapping, limits or metrics that make no sense, with the line and the key; ``model`` is no module.
        CompareError: the runs have no site in common.
    """
    golden, mine = open_run(golden), open_run(mine)
    modules = finder(mine, model)
    custom = Custom(metrics)
    fixed = None if limits is None else Limits.read(limits, custom.names)
    others = (
        [calibrate] if isinstance(calibrate, (str, os.PathLike, Run)) else list(calibrate or ())
    )
    calibration = Calibration()
    for other in map(open_run, others):
        calibration.add(
            other.label,
            list(
                engine.measure(
                    _paired(golden, other, Names(), progress), golden.load, other.load, golden.nodes
                )
            ),
        )
    pairs = _paired(golden, mine, names.read(mapping), progress)
    judging = engine.judging(
        pairs,
        golden.load,
        mine.load,
        nodes=golden.nodes,
        limits=fixed,
        calibration=calibration,
        custom=custom,
    )
    sides = [Side(run, run.kernel) for run in (golden, mine)]
    runs = Runs(sides[0], sides[1], engine.error, modules)

    def find(differences: Sequence[Difference]) -> list[Finding]:
        return blame.findings(differences, runs) if explain else []

    return Report(
        golden, mine, judging, find, says(fixed, calibration, judging.plain), custom.notes()
    )


def _paired(golden: Run, mine: Run, given: Names, progress: bool) -> Iterable[Pair]:
    """Return the pairs of two runs, with a bar that follows them. Raises CompareError."""
    traced = compiled.nodes(golden), compiled.nodes(mine)
    pairs = pair(
        golden.records(),
        mine.records(),
        given,
        (golden.nodes, mine.nodes),
        (golden.load, mine.load),
        traced,
    )
    if not _meet(pairs):
        raise CompareError(_nothing_in_common(golden, mine, pairs))
    if not progress:
        return pairs
    from tqdm.auto import tqdm

    return tqdm(pairs, desc="compare", unit="pair", delay=1, leave=False)  # type: ignore[no-any-return]


def export(
    what: Any, path: str | os.PathLike[str], *, at: Any = None, step: int | None = None, role: str = "output",
    side: str | None = None, slice: str | None = None, show: str | Sequence[str] = (), tokenizer: Any = None,
) -> Path:  # fmt: skip
    """Write what an explorer shows of a run (or its name or path) or of a report to a file; its suffix decides what that is.

    ``.html``: the explorer itself, in one file that needs neither kernel nor network. ``.png``, ``.svg``, ``.pdf``: its pictures, by matplotlib.
    ``at``: the tensor to show: the path of a module (with ``role`` and ``step``), a difference or finding of the report, or the number of
    a row; left out, a report is shown at its first mismatch. ``step``: generated token, as in `Run.tensor`. ``side``: golden, mine, difference or all.
    ``slice``: which part of the tensor, ``0, 3, :, :``. ``show``: only these pictures, of layers, growth, heatmap, histogram and curves.
    ``tokenizer``: as in `explore`.

    Raises:
        OptionError: an argument that makes no sense, or nothing to draw. TensorLookupError: there is no such tensor.
        StoreError: the file can't be written; and others of that kind: a run can't be opened.
    """
    view = what.view(tokenizer) if isinstance(what, Report) else RunView(open_run(what), tokenizer)
    pictures = [show] if isinstance(show, str) else list(show)
    return exporting.export(view, state_of(view, at, step, role, side, slice), Path(path), pictures)


def write_report(golden: Any, mine: Any | None, path: str | os.PathLike[str]) -> Path:
    """Write one HTML page: of one run (``mine`` None), or of two compared. Raises what `compare` raises."""
    if mine is not None:
        return compare(golden, mine).to_html(path)
    return write_text(path, html.page(RunView(open_run(golden))))


def _meet(pairs: list[Pair]) -> bool:
    """Tell whether the runs have a site in common, and not only that both are of some model, given other things."""
    both = [(p.golden, p.mine) for p in pairs if p.golden and p.mine]
    apart = all(
        not g.site.path and not m.site.path and g.summary.shape != m.summary.shape for g, m in both
    )
    inside = [
        {bool(getattr(p, side).site.path) for p in pairs if getattr(p, side)}
        for side in ("golden", "mine")
    ]
    return bool(both) and not (apart and all(True in paths for paths in inside))


def _nothing_in_common(golden: Run, mine: Run, pairs: list[Pair]) -> str:
    ours = {p.golden.site.path for p in pairs if p.golden}
    theirs = {p.mine.site.path for p in pairs if p.mine}
    same = ours & theirs - {""}
    if same:
        seen = [
            sorted({p.either.site.step for p in pairs if getattr(p, side)})
            for side in ("golden", "mine")
        ]
        what = f"{golden.label} has steps {seen[0]}, {mine.label} {seen[1]}, with other calls or arguments"
    else:
        examples = [min(paths - {""}, default="(root)") for paths in (ours, theirs)]
        what = f"{golden.label} has e.g. {examples[0]}, {mine.label} {examples[1]}"
    advice = "record the same model, steps and layers in both"
    return f"{golden.label} and {mine.label} have no site in common: {what}; {advice}"


def kept_line(run: Run) -> str:
    """Return one line that says what a recording kept, where, and how much; and what it could not."""
    info = run.info()
    meta = run.meta
    distinct = meta.get("distinct", info["payloads"])
    place = (
        run.path
        if run.path is None
        else os.path.relpath(run.path)
        if run.path.is_relative_to(Path.cwd())
        else run.path
    )
    parts = [
        f"{run.name}: {count_text(info['records'], 'tensor')} of {count_text(info['steps'], 'step')}"
    ]
    options = meta.get("options") or {}
    part = f"slice[{options['slice']}] of each, " if options.get("slice") else ""
    part = f"{options['reduce']} of each, " if options.get("reduce") else part
    if info["payloads"]:
        same = info["payloads"] - distinct
        parts.append(
            f"{part}{size_text(info['bytes'])} in {place}"
            + (f" ({same:,} were the same tensor again)" if same else "")
        )
    else:
        parts.append(f"statistics only, in {place}")
    text = "; ".join([", ".join(parts), *meta.get("determinism", []), *(meta.get("notes") or [])])
    if not info["complete"]:
        text += f"; incomplete: {info['ended_by'] or 'the recording ended early'}"
    for why, count in (meta.get("lost") or {}).items():
        text += f"; {count:,} not kept: {why}"
    for problem, count in (meta.get("problems") or {}).items():
        text += f"; {problem}" + (f" ({count:,} times)" if count > 1 else "")
    return text
