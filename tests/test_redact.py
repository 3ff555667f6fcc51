"""A redacted copy can be shared: it holds no values, sources and texts, and still compares."""

from __future__ import annotations

import copy
import errno
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.cli import main
from llmdebug_nb.core.columns import AT
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.store import redact
from llmdebug_nb.store import writer as writing
from llmdebug_nb.store.redact import REDACTED
from models import generate, llama
from recordings import record_linear


def record(model, name="whole", **options):
    with ld.dump(model, name=name, **{"mode": "module+aten", "tokens": "0-1", **options}) as run:
        generate(model, new=2)
    return run


def pair(plant, **options):
    golden, mine = llama(), copy.deepcopy(llama())
    plant(mine)
    return record(golden, "golden", **options), record(mine, "mine", **options)


def other_weight(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)


def other_activation(model):
    model.model.layers[1].mlp.act_fn = nn.GELU()


def files(folder: Path) -> dict[str, bytes]:
    found = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of a model whose program has texts, sources and views, and its redacted copy."""
    folder = tmp_path_factory.mktemp("runs")
    run = record(llama(), path=folder)
    before = files(run.path)
    small = ld.redact_run(run, folder / "shared")
    assert files(run.path) == before
    return run, small


def test_a_redacted_copy_has_no_values(runs):
    run, small = runs
    assert any(record.payload is not None for record in run.records())
    for old, new in zip(run.records(), small.records(), strict=True):
        assert (new.site, new.op, new.summary.shape) == (old.site, old.op, old.summary.shape)
        assert new.payload is None
        assert new.lost == (REDACTED if old.payload is not None else None)
        values = run.load(old)
        whole = values.numel() and bool((values == values.round()).all() and values.abs().max() > 1)
        if whole or old.summary.dtype.startswith("int"):  # tokens, and where they stand
            assert {new.summary.min, new.summary.mean, new.summary.fingerprint} == {None}
        else:
            assert new.summary == old.summary
    assert small.info()["bytes"] == 0


def test_a_redacted_copy_has_no_sources_and_no_texts(runs):
    run, small = runs
    data = b"".join(files(small.path).values())
    assert b".py" in b"".join(files(run.path).values())
    for text in (b".py", b"site-packages", b"def forward", b"return ", b"LlamaForCausalLM\x00"):
        assert text not in data
    texts = run.scalars().query("type == 'str'")["value"].dropna()
    assert len(texts) > 0
    assert small.scalars().query("type == 'str'")["value"].isna().all()
    numbers = "type == 'float' or type == 'bool'"
    assert small.scalars().query(numbers).equals(run.scalars().query(numbers))
    assert all(node.source is None for node in small.nodes)
    assert [node.path for node in small.nodes] == [node.path for node in run.nodes]


def test_privacy_lists_what_is_there_and_nothing_of_it_in_the_copy(runs):
    run, small = runs
    there, left = (
        {each.what: each.count for each in one.privacy().holdings} for one in (run, small)
    )
    gone = (
        "values of tensors", "of them, whole numbers", "lines of code", "names of files",
        "texts among arguments and attributes",
    )  # fmt: skip
    assert all(there[what] > 0 for what in gone)
    assert all(left[what] == 0 for what in gone)
    assert left["names of modules and operators"] == there["names of modules and operators"] > 0
    assert there["values of tensors"] == run.info()["payloads"]


def test_privacy_counts_the_bytes_and_shows_the_tokens(runs):
    run, _ = runs
    holdings = {each.what: each for each in run.privacy().holdings}
    first = next(r for r in run.records() if r.summary.dtype == "int64" and r.site.role == "input")
    shown = holdings["of them, whole numbers"].example
    assert ", ".join(str(n) for n in run.load(first).flatten()[:3].tolist()) in shown
    assert holdings["values of tensors"].bytes == run.info()["bytes"]
    assert len(run.privacy().to_pandas()) == len(holdings)


def test_views_say_why_values_are_missing(runs):
    _, small = runs
    assert "without values, sources and strings" in str(ld.compare(small, small))
    with pytest.raises(ld.errors.TensorLookupError, match=REDACTED):
        small.tensor("lm_head")
    assert json.loads((small.path / "llmdebug.json").read_text())["redacted"] is True


def test_a_redacted_copy_equals_its_run(runs):
    run, small = runs
    for one, other in ((run, small), (small, run), (small, small)):
        assert ld.compare(one, other).verdict == "match"


@pytest.mark.parametrize("plant", [other_weight, other_activation])
def test_redacted_copies_blame_the_module_that_the_runs_blame(plant):
    golden, mine = pair(plant)
    expected = ld.compare(golden, mine)
    assert expected.verdict == "diverged"
    module = expected.findings[0].path.partition("/")[0]
    small = ld.redact_run(golden), ld.redact_run(mine)
    for one, other in (small, (golden, small[1]), (small[0], mine)):
        report = ld.compare(one, other)
        assert report.verdict == "diverged"
        assert report.findings[0].path.partition("/")[0] == module


def test_a_recording_with_whole_texts_loses_them(tmp_path):
    class Model(nn.Module):
        def forward(self, x, prompt, next_token):
            return x.transpose(0, 1) + 1

    model = Model()
    with ld.dump(model, name="a", path=tmp_path, mode="module+api") as run:
        model(torch.ones(2, 3), prompt="a private prompt", next_token=4711)
    small = ld.redact_run(run)
    data = b"".join(files(small.path).values())
    assert b"a private prompt" not in data
    values = small.scalars().set_index("slot")["value"]
    assert values.isna()["kwargs.next_token"]
    views = [view for record in small.records() for view in record.views]
    assert {(view.source, view.arguments) for view in views} == {("", "0, 1")}


def test_the_copy_is_beside_the_run_or_where_it_was_asked_for(tmp_path):
    run = record_linear(tmp_path, "a")
    assert ld.redact_run(run).path == run.with_name("a.redacted")
    assert ld.redact_run(run).path == run.with_name("a.redacted.2")
    assert ld.redact_run(run, tmp_path / "b" / "c").path == tmp_path / "b" / "c"
    with pytest.raises(ld.errors.OptionError, match="there already: name a new folder"):
        ld.redact_run(run, tmp_path / "b" / "c")


def test_a_copy_that_fails_leaves_nothing_and_the_run_unchanged(tmp_path, monkeypatch):
    run = record_linear(tmp_path, "a")
    before = files(run)

    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing.Writer, "nodes", full)
    with pytest.raises(OSError, match="No space left"):
        ld.redact_run(run)
    assert files(run) == before
    assert [folder.name for folder in run.parent.iterdir()] == ["a"]


def test_a_dump_of_another_tool_is_not_redacted(tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(ld.errors.OptionError, match="only its own runs can be redacted"):
        ld.redact_run(tmp_path / "x.pt")


def test_a_run_of_two_processes_of_one_rank_is_copied_whole(tmp_path):
    folder, other = (record_linear(tmp_path, name) for name in ("a", "b"))
    (inner,) = other.glob("rank*")
    inner.rename(folder / "rank0_99999")
    run, small = ld.open_run(folder), ld.redact_run(folder)
    assert small.info()["processes"] == run.info()["processes"] == 2
    assert len(small) == len(run) == len(ld.reduce_run(run))


def test_the_command_line_redacts_and_lists(tmp_path, capsys):
    run, out = str(record_linear(tmp_path, "a")), str(tmp_path / "shared")
    assert main(["redact", run, "-o", out]) == 0
    assert "statistics only, redacted" in capsys.readouterr().out
    assert main(["info", "--privacy", run]) == 0
    listed = capsys.readouterr().out
    assert "values of tensors" in listed
    assert "command line" in listed
    assert main(["info", "--privacy", "--json", out]) == 0
    rows = {row["what"]: row["count"] for row in json.loads(capsys.readouterr().out)}
    assert rows["values of tensors"] == 0
    assert main(["redact", run, "-o", out]) == 3
    assert "name a new folder" in capsys.readouterr().err


class Ids(nn.Module):
    """Computes with token ids as floats, as a position or a hash may."""

    def __init__(self):
        super().__init__()
        self.emb, self.n_tok, self.width = nn.Embedding(40_000, 8), 31_337, 31_336

    def forward(self, ids):
        return self.emb(ids) * (ids.float() * 1.0 / 40_000)[..., None]


@pytest.mark.parametrize("ids", [[[31_337]], [[31_337, 5, 977]]])
def test_token_ids_that_are_stored_as_floats_are_no_statistics_of_a_copy(tmp_path, ids):
    model = Ids()
    with ld.dump(
        model, name="ids", path=str(tmp_path), mode="module+api+aten", tokens="all"
    ) as run:
        model(torch.tensor(ids))
    small = ld.redact_run(run, tmp_path / "shared")
    of_run, of_copy = list(run.records()), list(small.records())
    assert any(r.summary.max == 31_337 and r.summary.dtype == "float32" for r in of_run)
    assert all(r.summary.max != 31_337 for r in of_copy)
    kept = [(a, b) for a, b in zip(of_run, of_copy, strict=True) if b.summary.max is not None]
    assert kept
    assert all(a.summary == b.summary for a, b in kept)
    assert {b.site.path for _, b in kept} >= {"emb", ""}
    values = dict(small.scalars()[["slot", "value"]].itertuples(index=False))
    assert values["width"] == "31336"
    assert values["n_tok"] != values["n_tok"]  # missing


@given(st.lists(st.floats(-300, 300, width=16), min_size=1, max_size=40), st.booleans())
def test_whole_numbers_are_told_from_other_floats(values, rounded):
    tensor = torch.tensor(values, dtype=torch.float64)
    tensor = tensor.round() if rounded else tensor
    whole = bool((tensor == tensor.round()).all()) and bool((tensor.abs() > 1).any())
    found = summarize(tensor)
    row = [None] * len(AT)
    for name in ("min", "max", "mean", "l2norm"):
        row[AT[name]] = getattr(found, name)
    row[AT["shape"]] = json.dumps(list(found.shape))
    if whole:
        assert redact._whole(row)
    elif not float(tensor.sum()).is_integer():
        assert not redact._whole(row)
