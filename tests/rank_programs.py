"""Programs of several ranks, recorded by a server that forks: each rank is a process.

The server has imported all that they need and runs nothing itself, so that a run takes a second.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.store.run import Run

WIDTH, HIDDEN, CLASSES, ROWS = 8, 12, 6, 8
RESULTS: list[torch.Tensor] = []  # of a rank: its loss and gradients


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
        self._call(folder, program, args, ranks, name, {"weights": True, **options})
        return ld.open_run(folder / name)

    def _call(self, folder: Path, *call: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), *call]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '"the server has ended"')
        assert not answer, answer

    def results(self, folder: Path, program: str, name: str, ranks: int = 2) -> list[torch.Tensor]:
        """Return the losses and gradients of a program on all ranks; ``name``: "" records none."""
        self._call(folder, program, (), ranks, name, {})
        found = [torch.load(folder / f"{name}_results{rank}") for rank in range(ranks)]
        return [each for some in found for each in some]

    def stop(self) -> None:
        self._process.communicate(timeout=60)


def _serve() -> None:
    for name in (
        "torch.distributed._functional_collectives", "torch.distributed.fsdp",
        "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "transformers",
    ):  # fmt: skip
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print is no answer
    for line in sys.stdin:
        folder, program, args, ranks, name, options = json.loads(line)
        children = [
            _fork(Path(folder), globals()[program], args, rank, ranks, name, options)
            for rank in range(ranks)
        ]
        ends = [os.waitpid(child, 0)[1] for child in children]
        errors = [file.read_text() for file in sorted(Path(folder).glob(f"{name}_error*"))]
        if any(ends) and not errors:
            errors = [f"the ranks ended with {ends}"]
        print(json.dumps("\n".join(errors)), file=answers, flush=True)


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
        broken(args[0] if args and isinstance(args[0], str) else None, rank)
        torch.set_num_threads(1)
        if ranks > 1:
            where = f"file://{folder}/{name}_store"
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
        recording = ld.dump(name=name, path=folder, **options) if name else contextlib.nullcontext()
        with recording:
            program(rank, ranks, *args)
        torch.save(RESULTS, folder / f"{name}_results{rank}")
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
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    gradients = (each.grad for each in model.parameters())
    RESULTS.extend(
        getattr(each, "_local_tensor", each).clone()
        for each in (loss.detach(), *gradients)
        if each is not None
    )


def part(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return x.chunk(ranks)[rank]


def mesh_of(*sizes: int, names: tuple[str, ...]) -> dist.device_mesh.DeviceMesh:
    return dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def stale(module: nn.Module, bug: str | None, rank: int, where: int = 1) -> None:
    """Plant ``stale``: one rank has an old weight."""
    if bug == "stale" and rank == where:
        with torch.no_grad():
            weight = module.weight
            getattr(weight, "_local_tensor", weight).mul_(1.2)


def broken(bug: str | None, rank: int) -> None:
    """Plant a wrong `all_reduce` in the library: of all ranks, or of the last one."""
    original = dist.all_reduce

    @functools.wraps(original)
    def all_reduce(tensor: torch.Tensor, *args: object, **kwargs: object) -> None:
        if bug == "missing" and rank == 1:
            tensor.zero_()
        original(tensor, *args, **kwargs)
        if bug == "averages":
            tensor /= dist.get_world_size()
        elif bug == "late" and rank == 1:
            tensor *= 1.25

    if bug == "garbled":
        garbled(rank)
    if bug in ("missing", "averages", "late"):
        dist.all_reduce = all_reduce


def garbled(rank: int) -> None:
    """Plant a wrong message in the library: what rank 1 receives is 1.25 times what was sent."""
    receive, wait = dist.ProcessGroup.recv, dist.Work.wait
    into: dict[object, torch.Tensor] = {}

    def recv(self: object, tensors: list[torch.Tensor], *args: int) -> object:
        work = receive(self, tensors, *args)
        into[work] = tensors[0]
        return work

    def waited(self: object, *args: object) -> object:
        result = wait(self, *args)
        if rank == 1 and self in into:
            into[self] *= 1.25
        return result

    dist.ProcessGroup.recv, dist.Work.wait = recv, waited


# -- programs -------------------------------------------------------------------------------------


def whole(rank: int, ranks: int) -> None:
    train(*made())


def ddp(rank: int, ranks: int, bug: str | None = None) -> None:
    model, x, y = made()
    spread = nn.parallel.DistributedDataParallel(model)
    stale(model.layers[1].up, bug, rank)
    train(spread, part(x, rank, ranks), part(y, rank, ranks))


def zeroed(rank: int, ranks: int, bug: str | None = None) -> None:
    """DDP whose gradients are filled with zeros, of which two passes then add up.

    ``bug``: in the second pass, each rank keeps some of its own.
    """
    steps = [0]

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as texts
        own = bucket.buffer()[:4].clone()
        dist.all_reduce(bucket.buffer().div_(ranks))
        if bug is not None and steps[0] == 1:
            bucket.buffer()[:4] = own
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model, x, y = made()
    spread = nn.parallel.DistributedDataParallel(model)
    spread.register_comm_hook(None, hook)
    for at in range(4):
        steps[0] = at
        if at != 3:
            model.zero_grad(set_to_none=False)
        loss = ((spread(part(x, rank, ranks)) - part(y, rank, ranks)) ** 2).mean() * (1 + at)
        loss.backward()


def learns(rank: int, ranks: int, bug: str | None = None) -> None:
    """Three updates of DDP, or of one rank. ``bug``: in the second one, on rank 1 or on all.

    ``never``: in none of them, ranks reduce gradients.
    """
    model, x, y = made()
    spread = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for at in range(3):
        local = bug == "never" or (bug == "local" and at == 1)
        with spread.no_sync() if local else contextlib.nullcontext():
            out = spread(part(x, rank, ranks))
            ((out - part(y, rank, ranks)) ** 2).mean().backward()
        optimizer.param_groups[0]["lr"] = 0.2 if bug == "rate" and rank == 1 and at == 1 else 0.1
        if bug != "frozen" or rank != 1 or at != 1:
            optimizer.step()
        optimizer.zero_grad()


class Divided(nn.Module):
    """Two layers of which each rank has its own half, and one that all have."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        total = y.detach().clone()
        dist.all_reduce(total)
        return self.norm(y + (total - y.detach()))


def divided(rank: int, ranks: int) -> None:
    model = Divided(rank)
    for _ in range(2):
        (model(torch.ones(ROWS, WIDTH)) ** 2).sum().backward()


def sparsely(rank: int, ranks: int) -> None:
    """DDP over an embedding with sparse gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, CLASSES))
    spread = nn.parallel.DistributedDataParallel(model)
    spread(torch.tensor([1, 2 + rank, 3])).sum().backward()


def uneven(rank: int, ranks: int) -> None:
    """DDP of which one rank has a batch less."""
    model, x, y = made()
    spread = nn.parallel.DistributedDataParallel(model)
    with dist.algorithms.join.Join([spread]):
        for _ in range(1 + (rank == 0)):
            model.zero_grad()
            ((spread(part(x, rank, ranks)) - part(y, rank, ranks)) ** 2).mean().backward()


def hooked(rank: int, ranks: int, how: str) -> None:
    """DDP with a hook of its own. ``how``: what it does."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as texts
        sent = bucket.buffer()
        if how == "without rank 1" and rank == 1:
            sent.zero_()
        elif how == "in bfloat16":
            sent = sent.bfloat16()
        elif how == "signs":
            sent = sent.sign()
        elif how == "one without rank 1" and rank == 1 and bucket.is_last():
            sent[:8] = 0
        if how != "sums":
            sent /= ranks
        dist.all_reduce(sent)
        done = torch.futures.Future()
        done.set_result(bucket.buffer().copy_(sent))
        return done

    model, x, y = made()
    spread = nn.parallel.DistributedDataParallel(model)
    spread.register_comm_hook(None, hook)
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


def two_dimensions(rank: int, ranks: int, bug: str | None = None) -> None:
    """FSDP2 over tensor parallel: strided shards."""
    model, x, y = made()
    mesh = mesh_of(2, ranks // 2, names=("dp", "tp"))
    parallelized(model, mesh["tp"])
    for layer in model.layers:
        dist.fsdp.fully_shard(layer, mesh=mesh["dp"])
    dist.fsdp.fully_shard(model, mesh=mesh["dp"])
    stale(model.layers[1].up, bug, rank, where=3)
    at = mesh["dp"].get_local_rank()
    train(model, part(x, at, 2), part(y, at, 2))


def micro_steps(model: nn.Module, updates: int) -> Iterator[int]:
    """Yield 0 and 1, then update the weights; so many times."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(updates):
        yield from range(2)
        optimizer.step()
        optimizer.zero_grad()


def micro_batches(rank: int, ranks: int, bug: str | None = None, updates: int = 1) -> None:
    """Gradients of two halves of the batch are added up."""
    model, x, y = made()
    for at in micro_steps(model, updates):
        loss = ((model(part(x, at, 2)) - part(y, at, 2)) ** 2).mean()
        (loss if bug == "sum" else loss / 2).backward()


def accumulates(rank: int, ranks: int, bug: str | None, how: str, updates: int = 1) -> None:
    """Two micro-batches on each rank. ``how``: sharded by FSDP2, or DDP; reduced once, or each."""
    model, x, y = made()
    if how.startswith("fsdp"):
        mesh = mesh_of(ranks, names=("dp",))
        for layer in model.layers:
            dist.fsdp.fully_shard(layer, mesh=mesh)
        dist.fsdp.fully_shard(model, mesh=mesh)
    up = model.layers[1].up
    if how.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model)  # which makes replicas equal
    stale(up, bug, rank)
    for at in micro_steps(model, updates):
        last, here = at == 1, slice(4 * at + 2 * rank, 4 * at + 2 * rank + 2)
        waits = contextlib.nullcontext()
        if how == "fsdp once":
            model.set_requires_gradient_sync(last)
        elif how == "ddp once" and not last:
            waits = model.no_sync()
        with waits:
            loss = ((model(x[here]) - y[here]) ** 2).mean() / 2
            loss.backward()


def pipeline(rank: int, ranks: int, bug: str | None = None, numbered: bool = False) -> None:
    """Two stages and two micro-batches. ``numbered``: each stage numbers its layers from 0."""
    pipelining = dist.pipelining
    model, x, y = made()
    own = model.layers[rank]
    model.layers = nn.ModuleList([own])
    if not numbered:
        model.layers = Keyed({str(rank): own})
    if rank == 0:
        model.head = nn.Identity()
    stale(own.up, bug, rank)
    stage = pipelining.PipelineStage(model, rank, ranks, torch.device("cpu"))

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((out - target) ** 2).mean()

    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=loss)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y)


class Keyed(nn.ModuleDict):
    """Layers that keep their numbers."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.values())


class _Copied(torch.autograd.Function):
    """What all ranks take: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _Summed(torch.autograd.Function):
    """The sum over ranks."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, bug: str | None) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX if bug == "op" else dist.ReduceOp.SUM)
        return x / dist.get_world_size() if bug == "mean" else x

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _SummedLater(torch.autograd.Function):
    """The sum over ranks, by a collective that runs while the program goes on."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        gathering = dist.all_gather(parts, x.clone(), async_op=True)
        summing = dist.all_reduce(x, async_op=True)
        summing.wait()
        forgotten = dist.all_reduce(x.clone(), async_op=True)
        gathering.wait()
        forgotten.get_future().wait()
        return x + 0 * sum(parts)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Later(nn.Module):
    """What a layer gives, as a sum over ranks: ``[rows, 8]`` -> ``[rows, 8]``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SummedLater.apply(self.layer(x))


def spoilt(rank: int, ranks: int) -> None:
    """Twelve steps; in the sixth, one rank alone meets NaN."""
    model, x, _ = made()
    for step in range(12):
        batch = x.clone()
        if step == 5 and rank == 1:
            batch[0, 0] = math.nan
        model(batch)
        dist.barrier()


def one_way(rank: int, ranks: int) -> None:
    """A pipeline by hand: what the second rank receives first comes before its first call."""
    model, x, _ = made()
    body = model.layers[0]
    for step in range(4):
        if rank == 0:
            dist.send(body(x + step), 1)
        else:
            got = torch.empty(ROWS, WIDTH)
            dist.recv(got, 0)
            body(got)


def halves(rank: int, ranks: int) -> None:
    """DDP that reduces the second of two passes alone, of sums: a bias has equal gradients."""
    model, x, _ = made()
    spread = nn.parallel.DistributedDataParallel(model)
    for at in range(2):
        with contextlib.nullcontext() if at else spread.no_sync():
            spread(x[4 * at + 2 * rank :][:2]).sum().backward()


def sparse(rank: int, ranks: int) -> None:
    """An embedding with sparse gradients, and a layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, CLASSES))
    for _ in range(2):
        model(torch.tensor([1, 2, 3])).sum().backward()


def own_group(rank: int, ranks: int) -> None:
    """A group in Python, whose methods call those of the class."""
    made()[0](torch.ones(1, WIDTH))

    class Own(dist.ProcessGroup):
        def send(self, *args: object) -> object:
            return super().send(*args)

    class Plain(dist.ProcessGroup): ...

    for kind in (Own, Plain):
        group = kind(rank, ranks)
        for method in (group.send, group.recv):
            text = refusal(method)
            assert text.startswith("RuntimeError"), text


def refusal(method: Callable[..., object]) -> str:
    """Return what a group without a backend says; a RecursionError is no such answer."""
    try:
        method([torch.ones(1)], 0, 0)
    except RuntimeError as error:
        return type(error).__name__ + str(error)
    return ""


def messages(rank: int, ranks: int, bug: str | None = None) -> None:
    """Each rank gets the other's result: at once, later, and several at a time."""
    model, x, _ = made()
    other, got = 1 - rank, torch.empty(3, ROWS, CLASSES)
    out = model(x + rank)
    if rank == 0:
        dist.send(out, other)
        dist.recv(got[0], other)
    else:
        dist.recv(got[0], other)
        dist.send(out, other)
    works = [dist.isend(out + 1, other, tag=1), dist.irecv(got[1], other, tag=1)]
    exchange = [dist.P2POp(dist.isend, out + 2, other), dist.P2POp(FIRST_IRECV, got[2], other)]
    for work in [*works, *dist.batch_isend_irecv(exchange)]:
        work.wait()
    RESULTS.extend([out.detach(), *got.clone()])


FIRST_IRECV = dist.irecv  # as a program has it that took it before it was recorded


def asynchronous(rank: int, ranks: int) -> None:
    model, x, y = made()
    model.layers[0] = Later(model.layers[0])
    train(model, part(x, rank, ranks), part(y, rank, ranks))


class ManualMLP(nn.Module):
    """An MLP whose plain weights are divided by hand, as Megatron and vLLM do it."""

    def __init__(self, whole: MLP, rank: int, ranks: int, bug: str | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN // ranks), Summed(whole.down, rank, ranks, bug)
        with torch.no_grad():
            self.up.weight.copy_(part(whole.up.weight, rank, ranks))
            self.up.bias.copy_(part(whole.up.bias, rank, ranks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(_Copied.apply(x))))


class Summed(nn.Linear):
    """A linear layer whose inputs are divided."""

    def __init__(self, whole: nn.Linear, rank: int, ranks: int, bug: str | None) -> None:
        super().__init__(HIDDEN // ranks, WIDTH)
        self.bug = bug
        with torch.no_grad():
            self.weight.copy_(whole.weight.chunk(ranks, 1)[rank])
            self.bias.copy_(whole.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Summed.apply(x @ self.weight.T, self.bug) + self.bias


def manual(rank: int, ranks: int, bug: str | None = None) -> None:
    model, x, y = made()
    for at, whole in enumerate(model.layers):
        model.layers[at] = ManualMLP(whole, rank, ranks, bug if at == 1 else None)
    stale(model.layers[1].up, bug, rank)
    train(model, x, y)


class SequenceNet(nn.Module):
    """Two blocks over ``[batch, tokens, 8]``, with attention if it is asked for."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SequenceBlock(attends) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SequenceBlock(nn.Module):
    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()
        self.attention = Attention() if attends else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attention is not None:
            x = x + self.attention(x)
        return x + self.mlp(self.norm(x))


class Attention(nn.Module):
    """Attention whose keys and values come from all ranks, if there are several."""

    def __init__(self) -> None:
        super().__init__()
        # the gradient of a bias of keys is nothing but rounding
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, values = (self._gathered(each(x)) for each in (self.k, self.v))
        return torch.softmax(self.q(x) @ keys.mT / WIDTH**0.5, -1) @ values

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        return _Gathered.apply(x) if dist.is_initialized() else x


class _Gathered(torch.autograd.Function):
    """The tokens of all ranks: ``[batch, tokens, 8]`` -> ``[batch, all tokens, 8]``."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def sequences(attends: bool) -> tuple[SequenceNet, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return SequenceNet(attends), torch.randn(2, ROWS, WIDTH), torch.randn(2, ROWS, WIDTH)


def of_sequences(rank: int, ranks: int, attends: bool) -> None:
    model, x, y = sequences(attends)
    ((model(x) - y) ** 2).sum().backward()


def context_parallel(rank: int, ranks: int, bug: str | None = None) -> None:
    """Each rank has some tokens of each sequence."""
    model, x, y = sequences(True)
    stale(model.layers[1].attention.k, bug, rank)
    x, y = (each.chunk(ranks, 1)[rank] for each in (x, y))
    ((model(x) - y) ** 2).sum().backward()


def sequence_parallel(rank: int, ranks: int, bug: str | None = None) -> None:
    """Between the parts that are tensor parallel, each rank has some tokens."""
    parallel = dist.tensor.parallel
    model, x, y = sequences(False)
    tokens = dist.tensor.Shard(1)
    plan = {
        "layers.*.norm": parallel.SequenceParallel(),
        "layers.*.mlp.up": parallel.ColwiseParallel(input_layouts=tokens),
        "layers.*.mlp.down": parallel.RowwiseParallel(output_layouts=tokens),
    }
    parallel.parallelize_module(model, mesh_of(ranks, names=("tp",)), plan)
    stale(model.layers[1].mlp.up, bug, rank)
    x, y = (each.chunk(ranks, 1)[rank] for each in (x, y))
    ((model(x) - y) ** 2).sum().backward()


EXPERTS = 4


class Experts(nn.Module):
    """A router that gives each token to one of four experts: ``[tokens, 8]`` -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(number): MLP() for number in range(EXPERTS)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in self.experts.items():
            mine = chosen == int(number)
            if mine.any():
                out[mine] = expert(x[mine])
        return out


class SpreadExperts(nn.Module):
    """Experts on two ranks: tokens are sent to those that they are for, and back."""

    def __init__(self, whole: Experts, rank: int, ranks: int, numbered: bool) -> None:
        super().__init__()
        self.router = whole.router
        self._each = EXPERTS // ranks
        own = [whole.experts[str(n)] for n in range(rank * self._each, (rank + 1) * self._each)]
        first = 0 if numbered else rank * self._each
        self.experts = nn.ModuleDict({str(first + at): each for at, each in enumerate(own)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=EXPERTS)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        splits = [each.view(-1, self._each).sum(1).tolist() for each in (sent, got)]
        tokens = x.new_empty(sum(splits[1]), WIDTH)
        dist.all_to_all_single(tokens, x[order], splits[1], splits[0])
        numbers = torch.arange(self._each).repeat(len(splits[1])).repeat_interleave(got)
        out = torch.empty_like(tokens)
        for at, expert in enumerate(self.experts.values()):
            if (numbers == at).any():
                out[numbers == at] = expert(tokens[numbers == at])
        back = torch.empty_like(x)
        dist.all_to_all_single(back, out, splits[0], splits[1])
        result = torch.empty_like(x)
        result[order] = back
        return result


def experts() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(2)
    return nn.Sequential(Experts(), nn.Linear(WIDTH, WIDTH)), torch.randn(4 * ROWS, WIDTH)


@torch.no_grad()
def of_experts(rank: int, ranks: int) -> None:
    model, x = experts()
    model(x)


@torch.no_grad()
def expert_parallel(rank: int, ranks: int, bug: str | None = None, numbered: bool = False) -> None:
    model, x = experts()
    model[0] = SpreadExperts(model[0], rank, ranks, numbered)
    stale(model[0].router, bug, rank)
    model(part(x, rank, ranks))


def hugging_face(rank: int, ranks: int, folder: str, bug: str | None = None) -> None:
    """A Llama with ``tp_plan="auto"``, or whole. ``folder``: it is there, or is made there."""
    import transformers

    if not Path(folder, "config.json").is_file():
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
            num_hidden_layers=2, vocab_size=40,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    plan = {"tp_plan": "auto"} if ranks > 1 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **plan)
    stale(model.model.layers[1].mlp.up_proj, bug, rank)
    with torch.no_grad():
        model(torch.arange(12)[None])


if __name__ == "__main__":
    _serve()
