"""Measuring on a cluster: batches of pairs of payloads, with the places of their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from llmdebug_nb.app.cluster import worker
from llmdebug_nb.app.cluster.cluster import Cluster
from llmdebug_nb.app.cluster.dispatch import Dispatch
from llmdebug_nb.app.cluster.worker import Versions
from llmdebug_nb.comparison.jobs import Job, Outcome, Work, batches
from llmdebug_nb.comparison.threads import in_threads
from llmdebug_nb.core.determinism import threads
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.shards import Portion, portion, shards_of


@dataclass(frozen=True)
class Batch:
    """Jobs for one worker. ``numbers``: of each; ``portions``: the tensors of golden and mine."""

    numbers: list[int]
    jobs: list[Job]
    portions: tuple[Portion, Portion]

    @property
    def nbytes(self) -> int:
        return sum(job.nbytes for job in self.jobs)


def on_cluster(cluster: Cluster | None, golden: Run, mine: Run) -> Work:
    """Return what measures two runs on a cluster; in threads of this process without one.

    Raises ClusterError: no worker has our versions.
    """
    if cluster is None:
        return in_threads
    places = shards_of(golden), shards_of(mine)
    if places[0] is None or places[1] is None:
        cluster.alone(1)
        return in_threads
    both = places[0], places[1]
    cluster.check(both)

    def work(
        jobs: Sequence[Job], here: Callable[[Job], Outcome]
    ) -> Generator[tuple[int, Outcome], None, None]:
        def in_this_process(batch: Batch) -> list[Outcome]:
            with threads(1):
                return [here(job) for job in batch.jobs]

        tasks = [
            Batch(
                [number for number, _ in each],
                [job for _, job in each],
                (
                    portion(golden, both[0], [job.golden for _, job in each]),
                    portion(mine, both[1], [job.mine for _, job in each]),
                ),
            )
            for each in batches(jobs)
        ]
        remote = functools.partial(_measured, worker.versions())
        for batch, outcomes in Dispatch(cluster, remote, in_this_process).results(tasks):
            for number, job, outcome in zip(batch.numbers, batch.jobs, outcomes, strict=True):
                # what a worker could not read may be there for us
                yield number, here(job) if outcome.metrics is None else outcome

    return work


def _measured(ours: Versions, batch: Batch) -> list[Outcome]:
    return worker.measure(batch.portions, batch.jobs, ours)
