"""A smaller run: figures of each tensor in place of its values."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import llmdebug_nb as ld
from llmdebug_nb.cli import main
from llmdebug_nb.store import writer as writing
from models import generate, llama


def record(name: str = "whole", **options):
    model = llama()
    with ld.dump(model, name=name, mode="module+aten", **options) as run:
        generate(model, new=2)
    return run


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_a_reduced_run_is_what_recording_with_reduce_would_have_kept_and_the_old_one_is_untouched():
    run = record()
    before = files(run.path)
    small = ld.reduce_run(run, to="minmax")
    assert small.name == "whole.minmax"
    assert files(run.path) == before
    direct = record("direct", reduce="minmax")
    assert len(small) == len(run) == len(direct)
    assert small.info()["bytes"] < run.info()["bytes"]
    for old, new, there in zip(run.records(), small.records(), direct.records(), strict=True):
        assert (new.site, new.summary, new.producer) == (old.site, old.summary, old.producer)
        assert (new.kept, new.kept_shape) == (there.kept, there.kept_shape)
        if new.payload is not None:
            assert torch.allclose(
                small.load(new), direct.load(there), rtol=0, atol=0, equal_nan=True
            )
            if old.summary.numel:
                assert torch.equal(
                    small.load(new), torch.stack(torch.aminmax(run.load(old).double()))
                )
    assert small.operators().equals(run.operators())
    assert small.scalars().equals(run.scalars())
    assert small.nodes == run.nodes
    assert small.steps() == run.steps()


def test_quantiles_and_a_name_can_be_asked_for():
    run = record()
    small = ld.reduce_run("whole", to="quantile:5", name="five")
    record_ = next(small.records(role="output", path="lm_head"))
    assert record_.kept == "quantile[5]"
    values = run.load(next(run.records(role="output", path="lm_head"))).flatten()
    assert torch.allclose(
        small.load(record_).float(), torch.quantile(values, torch.linspace(0, 1, 5)), atol=1e-6
    )
    assert ld.open_run("five").name == "five"


def test_what_was_kept_in_part_stays_as_it_is():
    run = record(slice="..., :2")
    small = ld.reduce_run(run)
    for old, new in zip(run.records(), small.records(), strict=True):
        assert (new.kept, new.kept_shape, new.lost) == (old.kept, old.kept_shape, old.lost)
        if new.payload is not None:
            assert torch.equal(small.load(new), run.load(old))


def test_the_old_run_goes_only_when_the_new_one_is_whole_on_the_disk(
    monkeypatch: pytest.MonkeyPatch,
):
    run = record()
    before, written = files(run.path), []
    payload = writing.Writer.payload

    def full(self, row, data):
        written.append(1)
        if len(written) == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        payload(self, row, data)

    monkeypatch.setattr(writing.Writer, "payload", full)
    with pytest.raises(OSError, match="No space left"):
        ld.reduce_run(run, replace=True)
    monkeypatch.undo()
    assert files(run.path) == before
    assert [folder.name for folder in run.path.parent.iterdir()] == ["whole"]
    small = ld.reduce_run(run, replace=True)
    assert small.path == run.path
    assert small.name == small.label == "whole"
    assert {record_.kept for record_ in ld.open_run("whole").records() if record_.payload} == {
        "minmax"
    }


def test_a_name_that_a_message_offers_can_be_opened():
    ld.reduce_run(record(), replace=True)
    with pytest.raises(
        ld.errors.UnknownRunError, match=r"no run 'whole\.minmax'; .*there is whole$"
    ):
        ld.open_run("whole.minmax")
    run = ld.open_run("whole")
    run.path.rename(run.path.with_name("moved"))
    with pytest.raises(ld.errors.UnknownRunError, match=r"there is moved$"):
        ld.open_run("whole")


def test_a_reduced_run_compares_with_the_one_it_was_made_from():
    run = record()
    assert ld.compare(run, ld.reduce_run(run)).verdict == "match"


def test_the_command_line_says_what_it_kept(capsys: pytest.CaptureFixture[str]):
    record()
    assert main(["reduce", "whole", "--to", "quantile:3"]) == 0
    assert "whole.quantile: " in capsys.readouterr().out
    assert main(["reduce", "whole", "--to", "mean"]) == 3
    assert "reduce 'mean' is not known; known: minmax, quantile:N" in capsys.readouterr().err
    assert main(["reduce", "whole", "--name", "x", "--replace"]) == 3
    assert "with replace, the run keeps its name" in capsys.readouterr().err
    assert main(["reduce", "nothing"]) == 3
