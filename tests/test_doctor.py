"""What differs between two set-ups: planted differences are named, equal set-ups are quiet."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import llmdebug_nb as ld
from llmdebug_nb.app.doctor import own
from llmdebug_nb.app.doctor.comparing import compared
from llmdebug_nb.app.doctor.knowledge import known
from llmdebug_nb.capture import setup
from llmdebug_nb.cli import main
from llmdebug_nb.core.errors import OptionError, UnknownRunError
from llmdebug_nb.core.setups import LEVELS, Setup
from models import generate, gpt2, llama, mixtral, prompt, qwen2
from recordings import record

SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyz012345"


def generated(model: Any, name: str = "r", ids: torch.Tensor | None = None, **options: Any) -> Any:
    return record(model, lambda: generate(model, ids, new=2), name, **options)


def names(diagnosis: ld.doctor, *levels: str) -> list[str]:
    """Return section and name of the differences of these levels; default: the suspicious ones."""
    chosen = levels or ("high", "medium")
    return [f"{s.section}: {s.name}" for s in diagnosis.symptoms if s.level in chosen]


def checkpoint(folder: Path, model: Any, drop: str = "", **more: torch.Tensor) -> Path:
    """Write what `save_pretrained` would, with tensors taken out and added."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    (folder / "generation_config.json").write_text(
        json.dumps(model.generation_config.to_dict(), default=str)
    )
    tied = {name for group in setup.ties(model) for name in sorted(group)[:-1]}
    state = {
        name: value.clone()
        for name, value in model.state_dict().items()
        if name != drop and name not in tied
    }
    save_file(state | more, folder / "model.safetensors")
    return folder


# -- clean controls --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, qwen2, gpt2, mixtral])
def test_two_runs_of_one_program_are_the_same(make):
    model = make()
    diagnosis = ld.doctor(generated(model, "g"), generated(copy.deepcopy(model), "m"))
    assert diagnosis.verdict == "same", diagnosis
    assert {"config", "weights", "model", "generation", "switches", "random", "versions",
            "prompt"} <= set(diagnosis.result.compared)  # fmt: skip


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_run_its_model_and_its_checkpoint_are_the_same(make, tmp_path):
    model = make()
    run, folder = generated(model, "g"), checkpoint(tmp_path / "c", model)
    for golden, mine in ((run, model), (model, folder), (folder, model), (run, folder)):
        diagnosis = ld.doctor(golden, mine)
        assert diagnosis.verdict == "same", diagnosis
        assert diagnosis.result.compared["weights"] > 10


def test_recorded_weights_are_compared_too():
    model = llama()
    diagnosis = ld.doctor(generated(model, "g", weights=True), model)
    assert diagnosis.verdict == "same", diagnosis
    assert diagnosis.result.compared["weights"] > 10


# -- planted differences ---------------------------------------------------------------------------


def test_one_stale_weight_is_named_first():
    model = llama()
    port = copy.deepcopy(model)
    with torch.no_grad():
        port.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    stale = "weights: values of model.layers.1.mlp.up_proj.weight"
    for golden, mine in ((model, port), (generated(model, "g"), generated(port, "m"))):
        assert names(ld.doctor(golden, mine)) == [stale]
    text = str(ld.doctor(model, port))
    assert "1 of 2,048 elements differ" in text
    assert "can cause: a stale or wrongly converted weight" in text


def test_another_checkpoint_is_one_symptom():
    found = names(ld.doctor(llama(seed=0), llama(seed=1)))
    assert len(found) == 1
    assert found[0].startswith("weights: values of 16 of ")


def test_a_weight_in_another_dtype_is_compared_in_the_coarser_one():
    model = llama()
    port = copy.deepcopy(model)
    port.lm_head.bfloat16()
    found = names(ld.doctor(model, port))
    assert found == ["model: dtypes of parameters", "weights: dtype of lm_head.weight"] or set(
        found
    ) == {"model: dtypes of parameters", "weights: dtype of lm_head.weight"}
    with torch.no_grad():
        port.lm_head.weight[3, 3] = 9.0
    assert "weights: values of lm_head.weight" in names(ld.doctor(model, port))


def test_another_rope_theta_in_the_config_is_named():
    theta = {"rope_type": "default", "rope_theta": 5e5}
    model = llama()
    port = llama(rope_parameters=theta)
    port.load_state_dict(model.state_dict())
    found = ld.doctor(generated(model, "g"), generated(port, "m")).symptoms[0]
    assert found.level == "high"
    assert found.name.endswith("rope_theta")
    assert (found.golden, found.mine) == ("10000.0", "500000.0")
    assert "other angles" in found.can


@pytest.mark.parametrize("name", ["num_key_value_heads", "eos_token_id", "pad_token_id"])
def test_a_number_whose_name_speaks_of_keys_or_tokens_is_compared(tmp_path, name):
    golden = checkpoint(tmp_path / "golden", llama())
    mine = checkpoint(tmp_path / "mine", llama())
    config = json.loads((mine / "config.json").read_text(encoding="utf-8"))
    (mine / "config.json").write_text(json.dumps({**config, name: 1}), encoding="utf-8")
    (found,) = (one for one in ld.doctor(golden, mine).symptoms if one.name == name)
    assert found.mine == "1"
    assert setup.settings({name: "a text"})[name] == "<masked>"


def test_another_attention_implementation_is_named():
    model, port = llama(attn_implementation="sdpa"), llama(attn_implementation="eager")
    assert "model: attention" in names(ld.doctor(generated(model, "g"), generated(port, "m")))


def test_switches_are_named_and_threads_are_no_alarm():
    model = llama()
    golden = generated(model, "g")
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        calm = ld.doctor(golden, generated(model, "t"))
        torch.set_float32_matmul_precision("medium")
        mine = generated(model, "m")
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
    assert calm.verdict == "same"
    assert "switches: threads" in names(calm, "low")
    alarmed = ld.doctor(golden, mine)
    assert "switches: float32 matmul precision" in names(alarmed)
    assert alarmed.verdict == "suspicious"


def test_autocast_determinism_and_seeds_are_seen():
    model = llama()
    golden = generated(model, "g", seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        mine = generated(model, "m", seed=2)
    diagnosis = ld.doctor(golden, mine)
    assert "switches: autocast on CPU" in names(diagnosis)
    assert "random: seed of torch" in names(diagnosis, "low")


def test_another_class_of_a_module_is_named():
    model = llama()
    port = copy.deepcopy(model)
    port.model.layers[1].mlp.act_fn = torch.nn.GELU().eval()
    found = "modules: class of model.layers.1.mlp.act_fn"
    assert names(ld.doctor(model, port)) == [found]
    assert names(ld.doctor(generated(model, "g"), generated(port, "m"))) == [found]


def test_generation_settings_and_training_mode_are_named():
    model = llama()
    port = copy.deepcopy(model).train()
    port.generation_config.temperature = 0.3
    found = names(ld.doctor(model, port))
    assert "model: training mode" in found
    assert "generation: temperature" in found


def test_another_prompt_is_named():
    model = llama()
    ids = prompt()
    with_bos = torch.cat([torch.tensor([[1]]), ids], 1)
    found = names(ld.doctor(generated(model, "g", ids), generated(model, "m", with_bos)))
    assert "prompt: ids" in found


def test_keys_that_are_missing_or_unexpected_are_named(tmp_path):
    model = llama()
    folder = checkpoint(
        tmp_path / "c", model, drop="model.norm.weight", **{"model.extra.weight": torch.ones(3)}
    )
    diagnosis = ld.doctor(model, folder)
    assert names(diagnosis) == ["weights: missing keys", "weights: unexpected keys"]
    assert "model.norm.weight" in diagnosis.symptoms[0].golden
    assert "model.extra.weight" in diagnosis.symptoms[1].mine


def test_a_weight_of_another_shape_is_named(tmp_path):
    model = llama()
    folder = checkpoint(tmp_path / "c", model, **{"model.norm.weight": torch.ones(7)})
    assert names(ld.doctor(model, folder)) == ["weights: shape of model.norm.weight"]


def test_tied_embeddings_that_came_apart_are_named():
    model = llama(tie_word_embeddings=True)
    port = llama(tie_word_embeddings=False)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            port.state_dict()[name].copy_(value)
    assert "config: tie_word_embeddings" in names(ld.doctor(model, port))
    with torch.no_grad():
        port.lm_head.weight[0] += 1
    found = names(ld.doctor(model, port))
    assert any(name.startswith("weights: tied lm_head.weight = ") for name in found)


def test_weights_under_another_name_are_one():
    one = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    other = torch.nn.ModuleDict({"a": one[0], "b": one[1]})
    diagnosis = ld.doctor(one, other)
    assert [s for s in diagnosis.symptoms if s.section == "weights"] == []
    assert diagnosis.result.compared["weights"] == 4


class Words:
    """A tokenizer of bytes, with what a real one has."""

    bos_token = "<s>"
    padding_side = "left"

    def __init__(self, add: int = 0, template: str = "{{ messages }}") -> None:
        self.add, self.chat_template = add, template

    def encode(self, text: str) -> list[int]:
        return [1] * self.add + list(text.encode())

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return self.chat_template + str(messages)


class Split(torch.nn.Module):
    """Queries, keys and values in three layers."""

    def __init__(self):
        super().__init__()
        self.attn = torch.nn.ModuleDict({n: torch.nn.Linear(8, 8) for n in ("q", "k", "v")})
        self.out = torch.nn.Linear(8, 8)


class Fused(torch.nn.Module):
    """The same in one layer, with the weights of another model."""

    def __init__(self, other, order="qkv"):
        super().__init__()
        self.attn = torch.nn.ModuleDict({"qkv": torch.nn.Linear(8, 24)})
        self.out = copy.deepcopy(other.out)
        for name in ("weight", "bias"):
            parts = [getattr(other.attn[n], name).data for n in order]
            getattr(self.attn["qkv"], name).data = torch.cat(parts)


def test_weights_that_one_model_joins_are_no_symptom():
    split = Split()
    for diagnosis in (ld.doctor(split, Fused(split)), ld.doctor(Fused(split), split)):
        assert not [each for each in names(diagnosis) if each.startswith("weights")]
    wrong = names(ld.doctor(split, Fused(split, "kqv")))
    assert [n for n in wrong if n.startswith("weights")] == [
        "weights: only in golden", "weights: only in mine"
    ]  # fmt: skip


def test_the_number_of_parameters_is_no_precision():
    split = Split()
    assert "model: dtypes of parameters" not in names(ld.doctor(split, Fused(split)))
    assert "model: dtypes of parameters" in names(ld.doctor(split, Fused(split).half()))


def test_tokenizers_are_compared_by_their_ids_and_their_template():
    model = llama()
    same = ld.doctor(model, model, tokenizer=Words())
    assert same.verdict == "same"
    assert same.result.compared["tokenizer"] > 9
    bos = names(ld.doctor(model, model, tokenizer=(Words(), Words(add=1))))
    assert all(name.startswith("tokenizer: ids of ") for name in bos)
    assert len(bos) == 9
    changed = ld.doctor(model, model, tokenizer=(Words(), Words(template="{{ m }}")), texts=["a"])
    assert names(changed) == [
        "tokenizer: chat template",
        "tokenizer: chat template: a conversation",
    ]
    assert changed.symptoms[0].level == "high"


def test_a_changed_chat_template_of_a_checkpoint_is_named(tmp_path):
    model = llama()
    one, other = checkpoint(tmp_path / "a", model), checkpoint(tmp_path / "b", model)
    for folder, template in ((one, "{{ a }}"), (other, "{{ b }}")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert names(ld.doctor(one, other)) == ["tokenizer: chat template"]


# -- what is not known, and what is wrong ----------------------------------------------------------


def test_what_an_older_run_did_not_record_is_counted(monkeypatch):
    model = llama()
    monkeypatch.setattr(setup, "here", dict)
    monkeypatch.setattr(setup, "of_models", lambda models: {})
    old = generated(model, "old")
    diagnosis = ld.doctor(old, model)
    assert diagnosis.verdict == "same"
    for section in ("config", "switches", "random", "model", "generation"):
        assert f"{section} of old: not recorded" in diagnosis.result.not_compared


def test_a_filtered_run_lacks_no_weights():
    model = llama()
    diagnosis = ld.doctor(generated(model, "g", layers="model.layers.0.*"), model)
    assert diagnosis.verdict == "same", diagnosis
    assert any("was recorded with layers" in why for why in diagnosis.result.not_compared)


def test_a_damaged_set_up_is_told():
    from llmdebug_nb.app.doctor import setups

    run = generated(llama(), "g")
    run.meta["settings"] = {"config": 3}
    run.source.meta["settings"] = {"config": 3}
    assert setups.of_run(run).absent["config"] == "the recorded settings is damaged"


def test_wrong_arguments_are_told(tmp_path):
    model = llama()
    with pytest.raises(OptionError, match="got int"):
        ld.doctor(model, 3)
    with pytest.raises(UnknownRunError):
        ld.doctor(model, "nowhere")
    with pytest.raises(OptionError, match=r"encode\(text\)"):
        ld.doctor(model, model, tokenizer=object())
    with pytest.raises(OptionError, match="one, or golden's and mine's"):
        ld.doctor(model, model, tokenizer=(Words(),))
    (tmp_path / "config.json").write_text("[" * 100_000)
    broken = ld.doctor(model, tmp_path)
    assert "no config.json that can be read" in str(broken)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8)))
def test_any_set_up_agrees_with_itself(facts):
    one = Setup("a", "model", {"config": facts, "switches": facts})
    result = compared(one, one, progress=False)
    assert result.symptoms == ()
    assert result.verdict == ("same" if facts else "not compared")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("xyz")),
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("xyz")),
)
def test_both_ways_the_same_facts_differ_and_totals_add_up(one, other):
    sides = [Setup(name, "model", {"config": facts}) for name, facts in (("a", one), ("b", other))]
    there, back = compared(*sides, progress=False), compared(*sides[::-1], progress=False)
    assert {s.name for s in there.symptoms} == {s.name for s in back.symptoms}
    if one and other:
        assert there.compared["config"] == len(one.keys() | other.keys())


def test_every_kind_of_difference_says_what_it_can_cause():
    for section, name in (("config", "rope_parameters.rope_theta"), ("config", "rms_norm_eps"),
                          ("weights", "values of x"), ("switches", "threads")):  # fmt: skip
        assert known(section, name).level in LEVELS
        assert known(section, name).can
    assert known("config", "LlamaForCausalLM: hidden_act").level == "high"


# -- what a run records for it ---------------------------------------------------------------------


def test_asking_changes_neither_random_numbers_nor_switches():
    model = llama()
    state, before = torch.random.get_rng_state(), setup.switches()
    setup.here()
    setup.of_models([model])
    assert torch.equal(state, torch.random.get_rng_state())
    assert setup.switches() == before


def test_what_is_recorded_is_masked_listed_and_removed(tmp_path):
    model = llama()
    model.config.hub_token = SECRET
    model.config.remark = "plain"
    run = generated(model, "g")
    stored = run.meta["settings"]["config"]
    assert stored["hub_token"] == "<masked>"
    assert stored["remark"] == "plain"
    assert SECRET not in json.dumps(run.meta)
    assert run.info()["masked"] > 0
    held = {each.what: each for each in run.privacy().holdings}
    assert held["settings of the program and its models"].count > 40
    shared = ld.redact_run(run, tmp_path / "shared")
    assert not {"setup", "settings"} & shared.meta.keys()
    assert "config of shared: not recorded" in str(ld.doctor(shared, model)) or "not recorded" in (
        str(ld.doctor(shared, model))
    )


# -- front ends ------------------------------------------------------------------------------------


def test_the_command_exits_with_the_verdict(tmp_path, capsys):
    model = llama()
    port = copy.deepcopy(model)
    port.model.norm.weight.data[0] = 3.0
    generated(model, "g")
    generated(port, "m")
    folder = checkpoint(tmp_path / "c", model)
    table = tmp_path / "t.csv"
    assert main(["doctor", "g", str(folder)]) == 0
    assert main(["doctor", "g", "m", "--csv", str(table)]) == 1
    assert "model.norm.weight" in capsys.readouterr().out
    assert [row["level"] for row in csv.DictReader(table.open())] == ["high"]
    assert main(["doctor", "g"]) == 3
    assert main(["doctor", "g", "nowhere"]) == 3
    assert main(["doctor", "g", "m", "--self"]) == 3


def test_self_tells_what_works_and_what_is_missing(capsys, monkeypatch, tmp_path):
    assert main(["doctor", "--self"]) in (0, 1)
    text = capsys.readouterr().out
    for part in ("torch", "C kernel", "folder of runs", "disk", "JupyterLab extension", "dask"):
        assert part in text
    monkeypatch.setattr(own.os, "access", lambda *_: False)
    assert main(["doctor", "--self"]) == 1
    assert "set LLMDEBUG_RUNS" in capsys.readouterr().out


def test_the_magic_takes_models_and_names_are_escaped(ipython):
    model = llama()
    port = copy.deepcopy(model)
    port.config.remark = "<b>bold</b>\x1b[2J"
    ipython.user_ns.update(model=model, port=port)
    diagnosis = ipython.run_line_magic("llmdoctor", "model port")
    html = diagnosis._repr_html_()
    assert "&lt;b&gt;bold" in html
    assert "<b>bold" not in html
    assert "\x1b" not in str(diagnosis) + html
    assert ipython.run_line_magic("llmdoctor", "--self") is None


def real_tokenizer(folder: Path, template: str) -> Path:
    """Save a tokenizer of words, as transformers does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, **{f"w{i}": i for i in range(1, 96)}}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_the_commands_load_tokenizers_from_folders(tmp_path, capsys):
    model = llama()
    generated(model, "g")
    one = real_tokenizer(tmp_path / "a", "{{ messages[0]['content'] }}")
    other = real_tokenizer(tmp_path / "b", "user: {{ messages[0]['content'] }}")
    assert main(["doctor", "g", "g", "--tokenizer", str(one)]) == 0
    assert main(["doctor", "g", "g", "--tokenizer", str(one), "--tokenizer", str(other)]) == 1
    text = capsys.readouterr().out
    assert "✗ tokenizer: chat template: a conversation" in text
    assert "mine:   user: What is 2 + 2?" in text
    assert main(["logits", "g", "g", "--tokenizer", str(one)]) == 0
    first = ld.logits("g", "g").result.tokens[0].token
    assert f"golden  w{first}" in capsys.readouterr().out
    assert main(["logits", "g", "g", "--tokenizer", str(tmp_path / "none")]) == 3
    assert "can't be loaded" in capsys.readouterr().err


# -- checkpoints of torch.save --------------------------------------------------------------------


def saved(folder: Path, model: Any, *, old: bool = False, shards: int = 1) -> Path:
    """Save a model as older transformers do: one .bin, or shards with an index."""
    folder.mkdir()
    state = list(model.state_dict().items())
    (folder / "config.json").write_text(model.config.to_json_string(), encoding="utf-8")
    names = {}
    for number in range(shards):
        part = dict(state[number::shards])
        name = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin" if shards > 1 else (
            "pytorch_model.bin")  # fmt: skip
        torch.save(part, folder / name, _use_new_zipfile_serialization=not old)
        names |= dict.fromkeys(part, name)
    if shards > 1:
        index = json.dumps({"metadata": {}, "weight_map": names})
        (folder / "pytorch_model.bin.index.json").write_text(index, encoding="utf-8")
    return folder


def assert_a_wrong_row_is_told(model, folder):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] = 0
    names = [s.name for s in ld.doctor(model, folder).result.symptoms if s.section == "weights"]
    assert names == ["values of model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize("how", [{}, {"old": True}, {"shards": 3}])
def test_weights_in_bin_files_are_compared(tmp_path, how):
    model, other = llama(), llama()
    folder = saved(tmp_path / "c", model, **how)
    assert ld.doctor(model, folder).result.compared["weights"] >= len(list(model.parameters()))
    assert not [s for s in ld.doctor(model, folder).result.symptoms if s.section == "weights"]
    assert_a_wrong_row_is_told(other, folder)


def test_a_shard_that_is_absent_or_damaged_is_told_and_its_weights_are_no_symptom(tmp_path):
    model = llama()
    folder = saved(tmp_path / "c", model, shards=3)
    shards = sorted(folder.glob("*.bin"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:2000])
    result = ld.doctor(model, folder).result
    assert not [s for s in result.symptoms if s.section == "weights"]
    told = " ".join(result.not_compared)
    assert shards[0].name in told
    assert shards[1].name in told
    assert result.compared["weights"]


class _Runs:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


def test_no_code_of_a_bin_file_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = llama()
    folder = saved(tmp_path / "c", model)
    torch.save({"weight": _Runs()}, folder / "pytorch_model.bin")
    result = ld.doctor(model, folder).result
    assert "pytorch_model.bin" in " ".join(result.not_compared)
    assert not (tmp_path / "touched").exists()


def test_an_index_that_names_other_places_opens_nothing(tmp_path):
    model = llama()
    folder = saved(tmp_path / "c", model)
    index = {"weight_map": {"a": "../../etc/passwd.bin", "b": 3, "c": None}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    result = ld.doctor(model, folder).result
    assert not [s for s in result.symptoms if s.section == "weights"]


# -- the cache of Hugging Face --------------------------------------------------------------------


def cached(home: Path, model: Any, shards: int = 1) -> Path:
    """Lay a model out as huggingface_hub does: each file of a snapshot is a link to a blob."""
    from safetensors.torch import save_file

    plain = home / "plain"
    plain.mkdir(parents=True)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    (plain / "config.json").write_text(model.config.to_json_string(), encoding="utf-8")
    names = {}
    for number in range(shards):
        part = dict(list(state.items())[number::shards])
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors" if shards > 1 else (
            "model.safetensors")  # fmt: skip
        save_file(part, plain / file)
        names |= dict.fromkeys(part, file)
    if shards > 1:
        index = json.dumps({"weight_map": names})
        (plain / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    repository = home / "models--org--name"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for at, file_ in enumerate(sorted(plain.iterdir())):
        blob = file_.rename(repository / "blobs" / f"{at:040x}")
        (snapshot / file_.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@pytest.mark.parametrize("shards", [1, 2])
def test_a_snapshot_in_the_cache_of_hugging_face_is_a_checkpoint(tmp_path, shards):
    model, other = llama(), llama()
    snapshot = cached(tmp_path, model, shards)
    result = ld.doctor(model, snapshot).result
    assert result.compared["weights"] >= len(list(model.parameters()))
    assert result.compared["config"]
    assert not [s for s in result.symptoms if s.section == "weights"]
    assert not [why for why in result.not_compared if "safetensors" in why]
    assert_a_wrong_row_is_told(other, snapshot)


def test_a_blob_that_was_not_downloaded_is_told(tmp_path):
    model = llama()
    snapshot = cached(tmp_path, model, shards=2)
    shard = sorted(snapshot.glob("*.safetensors"))[0]
    shard.resolve().unlink()
    result = ld.doctor(model, snapshot).result
    assert shard.name in " ".join(result.not_compared)
    assert not [s for s in result.symptoms if s.section == "weights"]
    assert result.compared["weights"]
