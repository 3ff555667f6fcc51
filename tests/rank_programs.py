"""Programs of several ranks, recorded by a server that forks: each rank is a process.

The server has imported all that they need and runs nothing itself, so that a run takes a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.store.run import Run

WIDTH, HIDDEN, CLASSES, ROWS = 8, 12, 6, 8


class Server:
    """Records programs of this file."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def record(
        self, folder: Path, program: str, *args: object, ranks: int = 1, name: str = "mine",
        **options: object,
    ) -> Run:  # fmt: skip
        """Return the run of ``program(rank, ranks, *args)`` in so many processes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        call = [str(folder), program, args, ranks, name, {"weights": True, **options}]
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '"the server has ended"')
        assert not answer, answer
        return ld.open_run(folder / name)

    def stop(self) -> None:
        self._process.communicate(timeout=60)


def _serve() -> None:
    import torch.distributed._functional_collectives
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print is no answer
    for line in sys.stdin:
        folder, program, args, ranks, name, options = json.loads(line)
        children = [
            _fork(Path(folder), globals()[program], args, rank, ranks, name, options)
            for rank in range(ranks)
        ]
        for child in children:
            os.waitpid(child, 0)
        errors = sorted(Path(folder).glob(f"{name}_error*"))
        print(json.dumps("\n".join(file.read_text() for file in errors)), file=answers, flush=True)


def _fork(
    folder: Path, program: Callable[..., None], args: list[object], rank: int, ranks: int,
    name: str, options: dict[str, object],
) -> int:  # fmt: skip
    child = os.fork()
    if child == 0:
        _run(folder, program, args, rank, ranks, name, options)
    return child


def _run(
    folder: Path, program: Callable[..., None], args: list[object], rank: int, ranks: int,
    name: str, options: dict[str, object],
) -> NoReturn:  # fmt: skip
    """Run one rank. Nothing of the server must run to its end here."""
    try:
        torch.set_num_threads(1)
        if ranks > 1:
            where = f"file://{folder}/{name}_store"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
        with ld.dump(name=name, path=folder, **options):
            program(rank, ranks, *args)
        if ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        (folder / f"{name}_error{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(0)


# -- models ---------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks and a head: ``[rows, 8]`` -> ``[rows, 6]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def made() -> tuple[Net, torch.Tensor, torch.Tensor]:
    """Return a model with its inputs and targets, the same in each process."""
    torch.manual_seed(0)
    model = Net()
    return model, torch.randn(ROWS, WIDTH), torch.randn(ROWS, CLASSES)


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    ((model(x) - y) ** 2).mean().backward()


def part(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return x.chunk(ranks)[rank]


def mesh_of(*sizes: int, names: tuple[str, ...]) -> dist.device_mesh.DeviceMesh:
    return dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def stale(module: nn.Module, bug: str | None, rank: int, where: int = 1) -> None:
    """Plant ``stale``: one rank has an old weight."""
    if bug == "stale" and rank == where:
        with torch.no_grad():
            weight = module.weight
            getattr(weight, "_local_tensor", weight).mul_(1.5)


# -- programs -------------------------------------------------------------------------------------


def whole(rank: int, ranks: int) -> None:
    train(*made())


def ddp(rank: int, ranks: int, bug: str | None = None) -> None:
    model, x, y = made()
    spread = nn.parallel.DistributedDataParallel(model)
    stale(model.layers[1].up, bug, rank)
    train(spread, part(x, rank, ranks), part(y, rank, ranks))


def fsdp(rank: int, ranks: int, bug: str | None = None) -> None:
    model, x, y = made()
    mesh = mesh_of(ranks, names=("dp",))
    for layer in model.layers:
        dist.fsdp.fully_shard(layer, mesh=mesh)
    dist.fsdp.fully_shard(model, mesh=mesh)
    stale(model.layers[1].up, bug, rank)
    train(model, part(x, rank, ranks), part(y, rank, ranks))


def tensor_parallel(rank: int, ranks: int, bug: str | None = None) -> None:
    model, x, y = made()
    parallelized(model, mesh_of(ranks, names=("tp",)))
    stale(model.layers[1].up, bug, rank)
    train(model, x, y)


def parallelized(model: nn.Module, mesh: dist.device_mesh.DeviceMesh) -> None:
    parallel = dist.tensor.parallel
    plan = {
        "layers.*.up": parallel.ColwiseParallel(),
        "layers.*.down": parallel.RowwiseParallel(),
        "head": parallel.ColwiseParallel(output_layouts=dist.tensor.Replicate()),
    }
    parallel.parallelize_module(model, mesh, plan)


if __name__ == "__main__":
    _serve()
