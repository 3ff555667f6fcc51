"""Recorded values that are put into a live model tell each part's share of the logits' error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import llmdebug_nb as ld
from fake_vllm import LLM, Runner, Whole, installed, served
from llmdebug_nb.cli import main
from llmdebug_nb.core.errors import CompareError, OptionError
from models import llama, prompt


def recorded(model: Any, name: str, tmp_path: Path, ids: torch.Tensor) -> ld.Run:
    with ld.dump(model, name=name, path=tmp_path, tokens="all") as run, torch.no_grad():
        model(ids)
    assert isinstance(run, ld.Run)
    return run


def wrong_in(model: Any, *factors: tuple[int, float]) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer, factor in factors:
            other.model.layers[layer].mlp.up_proj.weight.mul_(factor)
    return other


@pytest.fixture
def ids() -> torch.Tensor:
    return prompt(7)


def test_shares_are_those_of_swaps_by_hand(tmp_path: Path, ids: torch.Tensor) -> None:
    golden = llama(num_hidden_layers=3)
    mine = wrong_in(golden, (0, 1.2), (2, 1.4))
    runs = recorded(golden, "golden", tmp_path, ids), recorded(mine, "mine", tmp_path, ids)
    found = ld.logits(*runs, progress=False).by_layer(mine, progress=False)
    with torch.no_grad():
        wanted = golden(ids).logits.double()
        hidden = golden(ids, output_hidden_states=True).hidden_states

        def error(layer: int | None) -> float:
            """Return the error of mine with golden's output of a layer put in."""
            handle = None
            if layer is not None:
                put = hidden[layer + 1]
                handle = mine.model.layers[layer].register_forward_hook(lambda *_: put)
            apart = mine(ids).logits.double() - wanted
            if handle is not None:
                handle.remove()
            return float(apart.norm() / wanted.norm())

        whole = error(None)
        expected = {}
        before = whole
        for layer in range(2):  # the last one's hidden state is normalised in transformers' list
            after = error(layer)
            expected[f"model.layers.{layer}"] = (before**2 - after**2) / whole**2
            before = after
    shares = {part.modules[-1]: part.share for part in found.parts}
    for path, share in expected.items():
        assert shares[path] == pytest.approx(share, abs=1e-4)
    assert found.error == pytest.approx(whole, rel=1e-5)
    assert shares["model.layers.2"] == pytest.approx((before / whole) ** 2, abs=1e-4)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
    most = max(found.inside, key=lambda part: part.share)
    assert most.modules[-1].endswith("mlp.up_proj")
    assert found.positions == 7


@pytest.mark.parametrize("which", [0, 1])
def test_the_live_model_may_be_that_of_either_run_and_stays_as_it_is(
    tmp_path: Path, ids: torch.Tensor, which: int
) -> None:
    golden = llama(num_hidden_layers=2)
    models = golden, wrong_in(golden, (1, 1.3))
    runs = [recorded(model, name, tmp_path, ids) for model, name in zip(models, "gm", strict=True)]
    live = models[which]
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in live.modules()]
    with torch.no_grad():
        logits = live(ids).logits
    found = ld.logits(runs[0], runs[1], progress=False).by_layer(live, progress=False)
    most = max(found.parts, key=lambda part: part.share)
    assert most.modules == ("model.layers.1",)
    assert most.share == pytest.approx(1, abs=1e-6)
    with torch.no_grad():
        assert torch.equal(live(ids).logits, logits)
    assert all(torch.equal(before[name], each) for name, each in live.state_dict().items())
    assert [len(module._forward_hooks) for module in live.modules()] == hooks
    table = found.to_pandas()
    assert list(table.columns) == ["level", "module", "share", "error_after"]
    assert set(table["level"]) == {"part", "inside"}


def test_an_engine_has_its_values_put_into_the_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    runner = Runner(padding=2)
    with torch.no_grad():
        runner.model.mlp.weight.mul_(1.2)
    with ld.dump(LLM(runner), name="engine", path=tmp_path, tokens="all") as mine:
        LLM(runner).generate(served())
    model = Whole()
    model.load_state_dict(Runner().model.state_dict())
    with ld.dump(model, name="whole", path=tmp_path, tokens="all") as golden, torch.no_grad():
        for text in runner.tokens.values():
            model(input_ids=torch.tensor([text]), positions=torch.arange(len(text))[None])
    found = ld.logits(golden, mine, progress=False).by_layer(model, progress=False)
    shares = {part.modules[-1]: part.share for part in found.parts}
    assert shares["mlp"] == pytest.approx(1, abs=1e-6)
    assert found.positions == 6


def test_what_cannot_be_shared_out_says_why(tmp_path: Path, ids: torch.Tensor) -> None:
    golden = llama(num_hidden_layers=1)
    mine = wrong_in(golden, (0, 1.3))
    one, two = recorded(golden, "golden", tmp_path, ids), recorded(mine, "mine", tmp_path, ids)
    check = ld.logits(one, two, progress=False)
    with pytest.raises(OptionError, match=r"Linear has not the modules of golden or of mine"):
        check.by_layer(torch.nn.Linear(2, 2))
    with pytest.raises(CompareError, match="no longer computes the recorded logits"):
        check.by_layer(wrong_in(golden, (0, 3.0)))
    with pytest.raises(CompareError, match="the logits are the same"):
        ld.logits(one, one, progress=False).by_layer(golden)
    with pytest.raises(OptionError, match="needs two runs"):
        ld.logits(one, mine, progress=False).by_layer(mine)
    last = tmp_path / "last"
    with ld.dump(mine, name="last", path=last, tokens="all", layers="lm_head") as head:
        mine(ids)
    with pytest.raises(CompareError):
        ld.logits(head, two, progress=False, at="lm_head").by_layer(golden)


def test_the_command_and_the_magic_print_the_shares(
    tmp_path: Path, ids: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = llama(num_hidden_layers=2)
    mine = wrong_in(golden, (1, 1.3))
    runs = [recorded(golden, "golden", tmp_path, ids), recorded(mine, "mine", tmp_path, ids)]
    golden.save_pretrained(tmp_path / "model")
    paths = [str(run.path) for run in runs]
    assert main(["logits", *paths, "--by-layer", str(tmp_path / "model")]) == 1
    assert "model.layers.1.mlp.up_proj" in capsys.readouterr().out
    assert main(["logits", *paths, "--by-layer", str(tmp_path / "nothing")]) == 3
    assert "model" in capsys.readouterr().err
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "llmdebug_nb")
    shell.user_ns.update(one=runs[0], two=runs[1], live=mine)
    shell.run_line_magic("llmlogits", "one two --by-layer live")
    assert "inside the largest one" in capsys.readouterr().out
    InteractiveShell.clear_instance()
