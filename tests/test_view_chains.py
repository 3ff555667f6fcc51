"""Views are no records: they are told by the records that they lead to, with their lines."""

from __future__ import annotations

import contextlib
import gc
import json
import sqlite3
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.capture.operators.view_chains import ViewChains, arguments_text
from llmdebug_nb.core.places import shown
from llmdebug_nb.core.records import View
from llmdebug_nb.store import format as fmt
from models import generate, llama
from recordings import change_index, record


class Heads(nn.Module):
    """Splits one projection into heads, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.last = nn.Identity()

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(2, 3, 2, 4)
        q = q.transpose(1, 2)
        k = k.unflatten(-1, (2, 4)).permute(0, 2, 1, 3)
        scores = torch.matmul(q, k.mT)
        values = torch.add(v[..., 1:], 1.0)
        again = torch.mul(q.transpose(1, 2).transpose(1, 2), 2.0)
        return self.last(scores[0]), values, again


def _run(mode="module+api", **options):
    model = Heads()

    def work():
        with torch.no_grad():
            model(torch.ones(2, 3, 8))

    return record(model, work, mode=mode, **options)


def _views(run, path, slot="0", role="input"):
    (found,) = (r for r in run.records(path=path, role=role) if r.site.slot == slot)
    return [(view.op, view.arguments) for view in found.views]


def test_an_input_tells_the_views_between_its_producer_and_itself_oldest_first():
    run = _run()
    assert _views(run, "/Torch.matmul", "0") == [
        ("Tensor.chunk", "3, dim=-1 [0]"),
        ("Tensor.view", "2, 3, 2, 4"),
        ("Tensor.transpose", "1, 2"),
    ]
    assert _views(run, "/Torch.matmul", "1") == [
        ("Tensor.chunk", "3, dim=-1 [1]"),
        ("Tensor.unflatten", "-1, (2, 4)"),
        ("Tensor.permute", "0, 2, 1, 3"),
        ("Tensor.mT", ""),
    ]
    assert _views(run, "/Torch.add") == [
        ("Tensor.chunk", "3, dim=-1 [2]"),
        ("Tensor.__getitem__", "..., 1:"),
    ]
    (matmul,) = (r for r in run.records(path="/Torch.matmul", role="input") if r.site.slot == "0")
    assert run.record(matmul.producer).site.path == "qkv"


def test_a_view_has_the_line_that_it_was_called_at():
    run = _run()
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = (r for r in run.records(path="/Torch.matmul", role="input") if r.site.slot == "0")
    for view in found.views:
        place, function = view.source.rsplit(" ", 1)
        file, line = place.rsplit(":", 1)
        assert (file, function) == (shown(__file__), "forward")
        assert view.op.removeprefix("Tensor.") in source[int(line) - 1]


def test_a_view_back_to_where_it_was_is_no_change():
    run = _run()
    assert _views(run, "/Torch.mul") == _views(run, "/Torch.matmul", "0")


def test_the_chain_begins_anew_at_each_recorded_output():
    run = _run()
    assert _views(run, "last") == [("Tensor.__getitem__", "0")]
    assert _views(run, "last", role="output") == [("Tensor.__getitem__", "0")]
    # the root gives what `last` gave: nothing lies between
    assert _views(run, "", role="output") == []


def test_the_dispatcher_level_tells_its_own_views():
    for grad in (False, True):
        model = Heads()
        with torch.set_grad_enabled(grad):
            run = record(model, lambda m=model: m(torch.ones(2, 3, 8)), mode="module+aten")
        assert [op for op, _ in _views(run, "/Aten.add.Tensor")] == [
            "Aten.split.Tensor",
            "Aten.slice.Tensor",
        ]
        assert [op for op, _ in _views(run, "last")] == ["Aten._unsafe_view", "Aten.select.int"]


def test_modules_alone_tell_no_views():
    assert all(found.views == () for found in _run("module").records())


def test_without_sources_views_have_none():
    run = _run(sources=False)
    views = [view for found in run.records() for view in found.views]
    assert views
    assert {view.source for view in views} == {""}


def test_each_chain_is_stored_once():
    run = _run()
    with sqlite3.connect(next(run.path.glob("rank*")) / fmt.INDEX) as db:
        chains = [chain for (chain,) in db.execute("SELECT chain FROM views")]
    db.close()
    assert len(chains) == len(set(chains)) > 3


@pytest.mark.parametrize("text", ["x", "3", "[[1]]", '[["a","b",3]]', '[["a"]]', "[" * 100_000])
def test_a_chain_that_is_none_is_refused(text):
    run = _run()
    change_index(run.path, "UPDATE views SET chain = ?", text)
    with pytest.raises(ld.errors.CorruptDumpError, match="the views of a record are damaged"):
        list(ld.open_run(run.path).records())


def test_views_hold_no_tensor():
    model = Heads()
    alive = []

    def count(*_):
        gc.collect()
        tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor)
        alive.append(sum(each.ndim == 2 and each.shape[1] == 1009 for each in tensors))

    with torch.no_grad(), ld.dump(model, name="r", mode="module+api", tokens="all"):
        handle = model.last.register_forward_hook(count)
        for _ in range(3):
            model(torch.ones(2, 3, 8))
            x = torch.ones(128, 1009)  # a size that no other test has
            for at in range(100):
                torch.relu(x[at:])
            del x
        handle.remove()
    assert alive == [0, 0, 0]


def test_a_storage_that_takes_the_place_of_a_freed_one_has_no_views_of_it():
    class Loop(nn.Module):
        def forward(self, x):
            total = x.sum()
            for _ in range(50):
                total = total + torch.relu((x + 1).t()).sum()
                fresh = torch.zeros(3, 4).add_(1)
                total = (
                    total + torch.sigmoid(fresh).sum() + torch.tanh(torch.empty(4, 3).zero_()).sum()
                )
            return total

    model = nn.Sequential(nn.Linear(4, 4), Loop())
    with torch.no_grad():
        run = record(model, lambda: model(torch.ones(3, 4)), mode="api")
    relu = [r.views for r in run.records(path="1/Torch.relu", role="input")]
    assert {tuple(view.op for view in views) for views in relu} == {("Tensor.t",)}
    for path in ("1/Torch.sigmoid", "1/Torch.tanh"):
        assert {r.views for r in run.records(path=path, role="input")} == {()}


def test_sparse_nested_and_transformed_tensors_are_no_problem():
    def work(x):
        sparse = torch.eye(3).to_sparse().t().transpose(0, 1)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).unsqueeze(0)
        return torch.func.vmap(lambda row: row.view(2, 2).t() + 1)(x), sparse, nested

    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.ones(1))

        def forward(self, x):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                return work(x)[0]
            return x

    for mode in ("module+api", "module+aten"):
        model = Strange()
        with torch.no_grad():
            run = record(model, lambda m=model: m(torch.ones(3, 4)), mode=mode)
        assert not run.info().get("problems"), run.info()


@settings(deadline=None)
@given(st.lists(st.sampled_from(["t", "half", "flat", "new"]), max_size=8))
def test_a_chain_replayed_on_the_output_gives_the_tensor(steps):
    """Each view of the chain, done again on the tensor that it began with, gives the same place."""
    chains = ViewChains()
    base = tensor = torch.arange(16.0).view(4, 4).clone()
    for step in steps:
        if step == "t":
            made = tensor.t() if tensor.dim() == 2 else tensor
        elif step == "half":
            made = tensor[: max(1, tensor.shape[0] // 2)]
        elif step == "flat":
            made = tensor.view(-1) if tensor.is_contiguous() else tensor
        else:
            storage = tensor.untyped_storage()._cdata
            if storage in chains.storages:
                chains.number_of(tensor, storage, True)
            base = tensor
            continue
        chains.add(View(step, "", ""), tensor, made)
        tensor = made
    storage = tensor.untyped_storage()._cdata
    number = chains.number_of(tensor, storage, False) if storage in chains.storages else None
    told = dict(chains.new)[number] if number is not None else "[]"
    for op, _, _ in json.loads(told):
        base = (
            base.t()
            if op == "t"
            else base[: max(1, base.shape[0] // 2)]
            if op == "half"
            else base.view(-1)
        )
    assert (base.shape, base.stride(), base.storage_offset()) == (
        tensor.shape, tensor.stride(), tensor.storage_offset(),
    )  # fmt: skip
    chains.clear()
    assert chains.storages == {}


def test_arguments_are_told_as_they_are_written():
    x = torch.ones(4, 4)
    assert arguments_text((x, (Ellipsis, None, slice(None, 2), 1)), {}, None) == "..., None, :2, 1"
    assert arguments_text((x, 1, 2), {}, None) == "1, 2"
    assert arguments_text((x, [1, 2]), {"dim": -1}, 1) == "(1, 2), dim=-1 [1]"
    assert arguments_text((x, x), {}, None) == ""
    assert len(arguments_text((x, tuple(range(1000))), {}, None)) < 100


def test_generation_tells_the_views_of_each_step():
    model = llama()
    with ld.dump(model, name="r", mode="module+api", tokens="all") as run:
        generate(model, new=3)
    path = "model.layers.0.self_attn/Tensor.mul"  # of the rotary embedding
    for step, tokens in enumerate((7, 1, 1)):
        found = next(run.records(path=path, role="input", step=step))
        told = [(view.op, view.arguments) for view in found.views]
        assert told[0][0] == "Tensor.view"
        assert told[0][1].startswith(f"1, {tokens}, -1,")
        assert told[1] == ("Tensor.transpose", "1, 2")
