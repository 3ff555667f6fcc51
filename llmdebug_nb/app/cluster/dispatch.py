"""Give tasks to the workers of a cluster, until each has a result: nothing is lost.

A worker that dies or runs out of memory loses its tasks to others, which Dask sees to. One that
hangs is given no more, and its tasks go to others, too. What has failed on several workers, or has
none to go to, is done in this process.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from llmdebug_nb.app.cluster.cluster import Cluster
from llmdebug_nb.app.cluster.worker import UnfitError
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import first_line

if TYPE_CHECKING:
    from distributed import Future


class Task(Protocol):
    """``nbytes``: what a worker reads for it."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Task)
R = TypeVar("R")
_HUNG = "a worker gave no answer in time"
_NO_WORKER = "no worker was left that can do the work"
_KILLED = "workers that did it were killed or ran out of memory"


@dataclass
class _Flight(Generic[T]):
    """A task at a worker. ``end``: when it is taken back."""

    task: T
    future: Future
    end: float


class Dispatch(Generic[T, R]):
    """Tasks on their way to results.

    ``remote``: does a task on a worker; with its arguments it must be known there by name.
    ``here``: does a task in this process.
    """

    def __init__(self, cluster: Cluster, remote: Callable[[T], R], here: Callable[[T], R]) -> None:
        self._cluster, self._remote, self._here = cluster, remote, here
        self._flying: dict[str, _Flight[T]] = {}
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._failures: Counter[int] = Counter()  # of a task, by its id

    def results(self, tasks: Sequence[T]) -> Generator[tuple[T, R], None, None]:
        """Yield each task with its result, as they come. Closing it takes all tasks back."""
        waiting = deque(tasks)
        self._cluster.tasks += len(waiting)
        try:
            while waiting or self._flying:
                room = self._room(bool(waiting))
                while waiting and len(self._flying) < room and self._send(waiting[0]):
                    waiting.popleft()
                if not self._flying:
                    task = waiting.popleft()
                    self._cluster.here[_NO_WORKER] += 1
                    yield task, self._here(task)
                    continue
                for task, again in self._taken_back():
                    if again is None:
                        waiting.append(task)
                        continue
                    yield task, again()
        finally:
            self._cancel(list(self._flying.values()))
            self._flying.clear()

    def _room(self, asked: bool) -> int:
        """Return how many tasks may be under way: each thread has one to do and one to begin."""
        return 2 * sum(self._cluster.threads().values()) if asked else 0

    def _send(self, task: T) -> bool:
        """Give a task to the cluster; return whether it took it."""
        key = f"llmdebug-{uuid.uuid4().hex}"
        only = {} if not self._cluster.unfit else {"workers": list(self._cluster.threads())}
        with self._cluster.perhaps_gone():
            future = self._cluster.client.submit(
                self._remote, task, key=key, pure=False, retries=0, **only
            )
            self._flying[key] = _Flight(task, future, time.monotonic() + patience(task))
            future.add_done_callback(lambda ended: self._ended.put(ended.key))
            return True
        return False

    def _taken_back(self) -> Generator[tuple[T, Callable[[], R] | None], None, None]:
        """Wait for the next task that ends; yield it with its result, or None to send it again."""
        first = min(flight.end for flight in self._flying.values())
        try:
            key = self._ended.get(timeout=max(0.0, first - time.monotonic()))
        except queue.Empty:
            for task in self._overdue():
                yield task, self._again(task, _HUNG)
            return
        flight = self._flying.pop(key, None)
        if flight is not None:
            yield flight.task, self._result(flight)

    def _result(self, flight: _Flight[T]) -> Callable[[], R] | None:
        from distributed import KilledWorker

        try:
            result = flight.future.result(timeout=max(1.0, flight.end - time.monotonic()))
            return lambda: result
        except UnfitError as error:
            self._cluster.unfit[error.address] = error.why
            return None
        except KilledWorker:
            return self._in_this_process(flight.task, _KILLED)
        except (Exception, _cancelled()) as error:
            return self._again(flight.task, f"{type(error).__name__}: {first_line(error)}")

    def _again(self, task: T, why: str) -> Callable[[], R] | None:
        """Return None if a task shall go to another worker, else what does it here."""
        self._failures[id(task)] += 1
        if self._failures[id(task)] < constants.CLUSTER_TRIES:
            return None
        return self._in_this_process(task, why)

    def _in_this_process(self, task: T, why: str) -> Callable[[], R]:
        self._cluster.here[why] += 1
        return lambda: self._here(task)

    def _overdue(self) -> list[T]:
        """Take back the tasks whose time is over, and give their workers no more."""
        now = time.monotonic()
        late = {key: flight for key, flight in self._flying.items() if flight.end <= now}
        for key in late:
            del self._flying[key]
        with self._cluster.perhaps_gone():
            for address, keys in self._cluster.client.processing().items():
                if any(str(key) in late for key in keys):
                    self._cluster.unfit[address] = _HUNG
        self._cancel(list(late.values()))
        return [flight.task for flight in late.values()]

    def _cancel(self, flights: list[_Flight[T]]) -> None:
        with contextlib.suppress(Exception):  # they are of no use any more, whatever happens
            self._cluster.client.cancel([flight.future for flight in flights], force=True)


def patience(task: Task) -> float:
    """Return the seconds after which a task is given up: it waits for another one, and is done."""
    return constants.CLUSTER_PATIENCE + 2 * math.ceil(task.nbytes / constants.SLOWEST_READING)


def _cancelled() -> type[BaseException]:
    """Return what the future of a task raises that Dask has cancelled: the scheduler is gone."""
    from concurrent.futures import CancelledError

    return CancelledError
