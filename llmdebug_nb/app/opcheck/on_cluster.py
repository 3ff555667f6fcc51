"""Checks on the workers of a cluster: each opens the run itself, and computes as this process does.

The bits of a reference may depend on the number of torch's threads, so the workers compute with as
many as this process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmdebug_nb.app.cluster import worker
from llmdebug_nb.app.cluster.cluster import Cluster
from llmdebug_nb.app.cluster.dispatch import Dispatch
from llmdebug_nb.app.cluster.worker import Versions
from llmdebug_nb.app.opcheck.checking import Checker, How
from llmdebug_nb.app.opcheck.choosing import Call
from llmdebug_nb.app.opcheck.processes import CHUNK
from llmdebug_nb.core.allocator import reused_memory
from llmdebug_nb.replay.checks import CallCheck
from llmdebug_nb.store import reader
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.shards import Shards, shards_of

_own = threading.local()  # of a worker's thread: the checker of the last run


@dataclass(frozen=True)
class Calls:
    """Calls for one worker. ``nbytes``: what it reads is not known before, and little."""

    calls: list[Call]
    nbytes: int = 0


def check_on_cluster(
    cluster: Cluster, run: Run, calls: Sequence[Call], how: How
) -> Iterator[CallCheck]:
    """Yield the checks of calls as they come.

    Raises ClusterError: no worker has our versions.
    """
    import torch

    how = replace(how, threads=how.threads or torch.get_num_threads())
    checker = functools.cache(lambda: Checker(run, how))
    tasks = [Calls(list(calls[at : at + CHUNK])) for at in range(0, len(calls), CHUNK)]

    def here(task: Calls) -> list[CallCheck]:
        return [checker().check(call) for call in task.calls]

    place = shards_of(run)
    if place is None:
        cluster.alone(len(tasks))
        for task in tasks:
            yield from here(task)
        return
    cluster.check([place])
    remote = functools.partial(_checked, worker.versions(), place, how)
    for _, checks in Dispatch(cluster, remote, here).results(tasks):
        yield from checks


def _checked(ours: Versions, place: Shards, how: How, task: Calls) -> list[CallCheck]:
    """Check calls on a worker. Raises UnfitError."""
    worker.fit_for([place], ours)
    if getattr(_own, "of", None) != (place, how):
        _own.checker, _own.of = Checker(reader.open_run(Path(place.path)), how), (place, how)
    checker: Checker = _own.checker
    with reused_memory():
        return [checker.check(call) for call in task.calls]
