"""Measuring with the cores of this process, in threads: the kernels let go of Python's lock.

torch adds up in as many parts as it has threads, so the last bits of a sum depend on their number.
Whoever measures therefore gives torch one thread, here and on other machines: the outcomes are the
same bits, however many jobs are done at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence

from llmdebug_nb.comparison.jobs import Job, Outcome, batches
from llmdebug_nb.core import constants, determinism

_Found = tuple[int, Outcome] | BaseException | None  # None: a thread has ended


def one_by_one(
    jobs: Sequence[Job], here: Callable[[Job], Outcome]
) -> Generator[tuple[int, Outcome], None, None]:
    """Do jobs one after the other, in this thread."""
    with determinism.threads(1):
        for number, job in enumerate(jobs):
            yield number, here(job)


def in_threads(
    jobs: Sequence[Job], here: Callable[[Job], Outcome], count: int = 0
) -> Generator[tuple[int, Outcome], None, None]:
    """Do jobs in as many threads as torch computes with, or in ``count``.

    Each thread holds the tensors of one job at a time. The threads end when the iterator is closed,
    after the jobs that they are at.
    """
    import torch

    waiting = list(batches(jobs))
    count = min(count or torch.get_num_threads(), len(waiting))
    if count < 2:
        yield from one_by_one(jobs, here)
        return
    with determinism.threads(1), contextlib.closing(_Threads(waiting, here, count)) as threads:
        yield from threads


class _Threads:
    """Threads that do batches of jobs, each the next one that nobody has begun."""

    def __init__(
        self,
        waiting: list[list[tuple[int, Job]]],
        here: Callable[[Job], Outcome],
        count: int,
    ) -> None:
        self._waiting, self._here, self._running = iter(waiting), here, count
        self._next = threading.Lock()
        self._small, self._large = threading.Lock(), threading.Lock()
        self._found: queue.Queue[_Found] = queue.Queue()
        self._closed = False
        for _ in range(count):
            threading.Thread(target=self._work, daemon=True).start()

    def __iter__(self) -> Iterator[tuple[int, Outcome]]:
        while self._running:
            found = self._found.get()
            if found is None:
                self._running -= 1
            elif isinstance(found, BaseException):
                raise found
            else:
                yield found

    def close(self) -> None:
        """Let the threads end."""
        self._closed = True

    def _work(self) -> None:
        try:
            while not self._closed:
                with self._next:
                    batch = next(self._waiting, None)
                if batch is None:
                    break
                for number, job in batch:
                    if self._closed:
                        break
                    self._found.put((number, self._done(job)))
        except BaseException as error:  # it belongs to the thread that asks
            self._found.put(error)
        finally:
            self._found.put(None)

    def _done(self, job: Job) -> Outcome:
        """Do a job; of very small and of very large ones, one at a time."""
        size = job.nbytes
        if size < constants.SMALL_BYTES:
            with self._small:
                return self._here(job)
        if size >= constants.ALONE_BYTES:
            with self._large:
                return self._here(job)
        return self._here(job)
