"""A Dask cluster that work is given to: found or started, and asked what its workers can do."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from llmdebug_nb.app.cluster.worker import Unfit, probe, versions
from llmdebug_nb.core import constants
from llmdebug_nb.core.bars import Stages
from llmdebug_nb.core.errors import ClusterError, MissingPackageError, OptionError, first_line
from llmdebug_nb.store.shards import Shards

if TYPE_CHECKING:
    from distributed import Client

ClusterLike: TypeAlias = "str | Client"
LOCAL = "local"
_START = "`dask scheduler` starts one, `dask worker ADDRESS` a worker"
_PROBED = ("tcp", "tls")  # schemes of which a socket tells whether somebody listens


class Cluster:
    """The workers of a cluster that can do some work. Made by `connected`.

    ``unfit``: why others can't, by address. ``here``: how often work was done in this process, by
    the reason.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.unfit: dict[str, str] = {}
        self.here: Counter[str] = Counter()
        self.tasks = 0

    def alone(self, tasks: int) -> None:
        """Note that tasks are done here, as their tensors are in this process alone."""
        self.tasks += tasks
        self.here["the tensors of a run are in this process alone"] += tasks

    @contextlib.contextmanager
    def perhaps_gone(self) -> Iterator[None]:
        """Pass over what Dask's client raises where its scheduler is gone.

        A client that has given up lacks its scheduler: AttributeError.
        """
        with contextlib.suppress(OSError, TimeoutError, RuntimeError, AttributeError):
            yield

    def threads(self) -> dict[str, int]:
        """Return the threads of each worker that can do the work, by address."""
        found: dict[str, int] = {}
        with self.perhaps_gone():
            found = self.client.nthreads()
        return {address: n for address, n in found.items() if address not in self.unfit}

    def check(self, places: Sequence[Shards]) -> None:
        """Ask all workers whether they can do the work; those that can't get none.

        Raises ClusterError: all have other versions than this machine.
        """
        try:
            self.client.run_on_scheduler(versions)  # it reads the tasks
        except Exception as error:
            raise ClusterError(
                f"cluster: the scheduler can't pass tasks on: {first_line(error)}; install"
                " llmdebug-nb there, too, or leave cluster out"
            ) from None
        found = self.client.run(probe, list(places), versions(), on_error="return")
        answers = {
            address: Unfit(first_line(each), True) if isinstance(each, BaseException) else each
            for address, each in found.items()
        }
        self.unfit |= {address: each.why for address, each in answers.items() if each is not None}
        if answers and all(each is not None and each.other_version for each in answers.values()):
            address, why = next(iter(self.unfit.items()))
            raise ClusterError(
                f"cluster: none of {len(answers)} workers has the versions of this machine;"
                f" {address}: {why}; install these there, or leave cluster out"
            )

    def notes(self) -> list[str]:
        """Return what the cluster did not do, in words."""
        found = Counter(self.unfit.values())
        lines = [
            f"cluster: {count} worker{'s' * (count != 1)} could not take part: {why}"
            for why, count in found.items()
        ]
        return lines + [
            f"cluster: {count:,} of {self.tasks:,} tasks were done in this process: {why}"
            for why, count in self.here.items()
        ]


@contextlib.contextmanager
def connected(cluster: ClusterLike | None, progress: bool) -> Iterator[Cluster | None]:
    """Yield a cluster: ``local`` (started now), an address, or a client of the caller's.

    None: there is none. What was started or opened here is closed at the end.

    Raises:
        MissingPackageError: the extra ``cluster`` is not installed.
        OptionError: no address. ClusterError: no scheduler answers, or it has no worker.
    """
    if cluster is None:
        yield None
        return
    try:
        from distributed import Client
    except ImportError:
        raise MissingPackageError(
            "cluster: needs Dask: pip install 'llmdebug-nb[cluster]'"
        ) from None
    with contextlib.ExitStack() as undo:
        with Stages("looking for the cluster", progress) as stages:
            if isinstance(cluster, Client):
                client = cluster
            elif cluster == LOCAL:
                stages.stage("starting workers")
                client = _client(undo.enter_context(_started()), undo)
            else:
                _look_for(cluster)
                client = _client(cluster, undo)
            _wait(client)
        yield Cluster(client)


def _wait(client: Client) -> None:
    """Wait for a worker. Raises ClusterError: none comes."""
    try:
        client.wait_for_workers(1, timeout=constants.CLUSTER_CONNECT)
    except TimeoutError:
        raise ClusterError(
            f"cluster: {client.scheduler.address} has had no worker for"
            f" {constants.CLUSTER_CONNECT:g} s; `dask worker ADDRESS` starts one"
        ) from None


def _client(cluster: object, undo: contextlib.ExitStack) -> Client:
    from distributed import Client

    try:
        client = Client(cluster, timeout=constants.CLUSTER_CONNECT, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(
            f"cluster: no Dask scheduler answers at {cluster} ({first_line(error)}); {_START}"
        ) from None
    undo.callback(client.close)
    return client


def _look_for(address: object) -> None:
    """Raise OptionError if it is no address, ClusterError if nobody listens there."""
    try:
        if not isinstance(address, str):
            raise ValueError
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
        if not (parts.scheme and host and port):
            raise ValueError
    except ValueError:
        raise OptionError(
            f"cluster: {address!r} is no cluster; expected {LOCAL!r}, an address such as"
            " 'tcp://host:8786', or a distributed.Client"
        ) from None
    if parts.scheme in _PROBED:
        try:
            socket.create_connection((host, port), constants.CLUSTER_CONNECT).close()
        except OSError as error:
            why = error.strerror or first_line(error)
            raise ClusterError(f"cluster: nobody listens at {address} ({why}); {_START}") from None


@contextlib.contextmanager
def _started() -> Iterator[object]:
    """Yield workers on this machine, each a process of one thread for each core that we may use."""
    import torch
    from distributed.deploy.subprocess import SubprocessCluster

    if os.name == "nt":
        raise ClusterError(f"cluster: {LOCAL!r} starts no workers on Windows; {_START}")
    # not LocalCluster: its workers run the user's script again
    with SubprocessCluster(
        n_workers=torch.get_num_threads(), threads_per_worker=1, dashboard_address=":0",
        silence_logs=_SILENT,
    ) as cluster:  # fmt: skip
        yield cluster


_SILENT = 40  # logging.ERROR
