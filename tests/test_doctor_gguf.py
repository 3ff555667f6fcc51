"""A GGUF file against its checkpoint: right conversions are quiet, planted mistakes are named."""

from __future__ import annotations

import pytest
import torch

import llmdebug_nb as ld
from gguf_files import HEADS, KINDS, KV, MODELS, Bug, checkpoint, convert, permuted
from llmdebug_nb.cli import main
from llmdebug_nb.core.errors import CorruptDumpError

L0, L1 = "model.layers.0.", "model.layers.1."


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Return a function that makes the checkpoint of a model once."""
    made = {}

    def folder(model):
        if model not in made:
            made[model] = checkpoint(tmp_path_factory.mktemp("hf") / model, model)
        return made[model]

    return folder


def put(name, change):
    """Return what replaces one tensor by `change(tensor)`."""

    def apply(tensors):
        tensors[name] = change(tensors[name]).clone()

    return apply


def copy(name, source):
    def apply(tensors):
        tensors[name] = tensors[source].clone()

    return apply


def swap(one, other):
    def apply(tensors):
        tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()

    return apply


def drop(*parts):
    def apply(tensors):
        for name in [name for name in tensors if all(part in name for part in parts)]:
            del tensors[name]

    return apply


def every(part, change):
    def apply(tensors):
        for name in tensors:
            if part in name:
                tensors[name] = change(tensors[name]).clone()

    return apply


DENSE = {
    "transposed": Bug("transposed", L0 + "self_attn.o_proj",
                      before=put(L0 + "self_attn.o_proj.weight", lambda w: w.T)),
    "another layer": Bug(f"it holds {L0}mlp.up_proj.weight", L1 + "mlp.up_proj",
                         before=copy(L1 + "mlp.up_proj.weight", L0 + "mlp.up_proj.weight")),
    "gate and up swapped": Bug(f"it holds {L1}mlp.gate_proj.weight", L1 + "mlp.up_proj",
                               before=swap(L1 + "mlp.gate_proj.weight", L1 + "mlp.up_proj.weight")),
    "missing": Bug("missing in the GGUF file", L1 + "self_attn.v_proj",
                   before=drop(L1 + "self_attn.v_proj.weight")),
    "one row": Bug("in row 7", L0 + "mlp.down_proj", before=put(
        L0 + "mlp.down_proj.weight",
        lambda w: torch.cat([w[:7], w[7:8] * -1, w[8:]]))),
    "norm": Bug(f"it holds {L0}input_layernorm.weight", L1 + "input_layernorm",
                before=copy(L1 + "input_layernorm.weight", L0 + "input_layernorm.weight")),
}  # fmt: skip
HEAD = {
    "head is the embedding": Bug("it holds model.embed_tokens.weight", "lm_head",
                                 before=copy("lm_head.weight", "model.embed_tokens.weight")),
    "head missing": Bug("missing in the GGUF file", "lm_head", before=drop("lm_head")),
}  # fmt: skip


def meta(arch):
    return {
        "rope base": Bug("500000.0", "rope_theta", meta={f"{arch}.rope.freq_base": 5e5}),
        "eps": Bug("0.01", "rms_norm_eps", meta={f"{arch}.attention.layer_norm_rms_epsilon": 1e-2}),
        "kv heads": Bug("4", "num_key_value_heads",
                        meta={f"{arch}.attention.head_count_kv": HEADS}),
    }  # fmt: skip


def q(name, change):
    return {"before": put(f"{L0}self_attn.{name}_proj.weight", change)}


PLANTED = {
    "llama": DENSE | HEAD | meta("llama") | {
        "not reordered": Bug("in the order of the checkpoint", "q_proj", permute=0),
        "reordered twice": Bug("reordered twice", "k_proj", permute=2),
        "reordered for other heads": Bug("reordered for 2 heads", "self_attn.q_proj", after=put(
            "blk.0.attn_q.weight", lambda w: permuted(_halved(w, HEADS), KV))),
        "head size": Bug("32", "head_dim", meta={"llama.rope.dimension_count": 32}),
    },
    "qwen2": DENSE | HEAD | meta("qwen2") | {
        "reordered": Bug("reordered into pairs", "q_proj",
                         **q("q", lambda w: permuted(w, HEADS))),
        "biases missing": Bug("missing in the GGUF file", "bias", before=drop("bias")),
    },
    "qwen3": DENSE | HEAD | meta("qwen3") | {
        "reordered": Bug("reordered into pairs", "k_proj", **q("k", lambda w: permuted(w, KV))),
        "norms of q and k swapped": Bug(f"it holds {L0}self_attn.k_norm", "q_norm", before=swap(
            L0 + "self_attn.q_norm.weight", L0 + "self_attn.k_norm.weight")),
        "norms of q missing": Bug("missing in the GGUF file", "q_norm", before=drop("q_norm")),
    },
    "gemma2": DENSE | meta("gemma2") | {
        "1 not added": Bug("1 is not added", "norm", plus=0.0),
        "1 added twice": Bug("1 is added to it twice", "norm", plus=2.0),
        "head of its own": Bug("values of its own", "embed_tokens", after=lambda t: t.update(
            {"output.weight": t["token_embd.weight"] * 0.5})),
        "window": Bug("not in the file", "sliding_window",
                      meta={"gemma2.attention.sliding_window": None}),
        "softcap": Bug("15.0", "final_logit", meta={"gemma2.final_logit_softcapping": 15.0}),
    },
    "mixtral": HEAD | meta("llama") | {
        "not reordered": Bug("in the order of the checkpoint", "q_proj", permute=0),
        "experts reversed": Bug("experts in another order: 3, 2, 1, 0", "w1", after=put(
            "blk.0.ffn_gate_exps.weight", lambda w: w.flip(0))),
        "experts transposed": Bug("transposed", "w2", after=put(
            "blk.1.ffn_down_exps.weight", lambda w: w.transpose(1, 2))),
        "router rows": Bug("its rows are shifted", "block_sparse_moe.gate", after=put(
            "blk.0.ffn_gate_inp.weight", lambda w: w.roll(1, 0))),
        "w1 and w3 swapped": Bug("it holds", "w3", after=swap(
            "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight")),
        "experts used": Bug("1", "num_experts_per_tok", meta={"llama.expert_used_count": 1}),
    },
}  # fmt: skip


def _halved(rows, heads):
    size = rows.shape[0] // heads
    return rows.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def suspicious(golden, file):
    return [
        (s.section, s.name, f"{s.golden} {s.mine}")
        for s in ld.doctor(golden, file, progress=False).result.suspicious
    ]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_conversion_is_quiet(folders, tmp_path, model, kind):
    file = convert(folders(model), tmp_path / "m.gguf", model, kind)
    found = ld.doctor(folders(model), file, progress=False)
    assert found.symptoms == ()
    assert found.result.compared["weights"] > 20
    assert found.result.compared["config"] >= 9
    assert not any("weights" in each for each in found.result.not_compared)


@pytest.mark.parametrize(
    ("model", "bug", "kind"),
    [
        (model, bug, "Q4_K" if number % 2 else "F32")
        for model, bugs in PLANTED.items()
        for number, bug in enumerate(bugs)
    ],
)
def test_a_planted_mistake_and_its_place_are_named(folders, tmp_path, model, bug, kind):
    planted = PLANTED[model][bug]
    file = convert(folders(model), tmp_path / "m.gguf", model, kind, planted)
    found = suspicious(folders(model), file)
    said = [f"{name} {texts}" for _, name, texts in found if planted.at in f"{name} {texts}"]
    assert any(planted.says in each for each in said), found
    assert len(found) <= 2, found


def test_one_element_that_differs_is_found_unless_its_step_explains_it(folders, tmp_path):
    name = f"{L0}self_attn.v_proj.weight"

    def changed(by):
        def apply(tensors):
            tensors[name] = tensors[name].clone()
            tensors[name][3, 5] += by

        return Bug("", "", before=apply)

    for kind, small, large in (("F32", 0.0, 1e-4), ("Q8_0", 1e-7, 0.02), ("Q4_K", 1e-7, 0.2)):
        for by, count in ((small, 0), (large, 1)):
            file = convert(folders("llama"), tmp_path / "m.gguf", "llama", kind, changed(by))
            assert len(suspicious(folders("llama"), file)) == count, (kind, by)


def test_two_files_of_one_checkpoint_are_compared_by_their_names(folders, tmp_path):
    one = convert(folders("llama"), tmp_path / "one.gguf", "llama", "F16")
    same = convert(folders("llama"), tmp_path / "two.gguf", "llama", "Q8_0")
    assert suspicious(one, same) == []
    bug = PLANTED["llama"]["another layer"]
    other = convert(folders("llama"), tmp_path / "three.gguf", "llama", "Q8_0", bug)
    ((_, name, texts),) = suspicious(one, other)
    assert name == "values of blk.1.ffn_up.weight"
    assert "it holds blk.0.ffn_up.weight" in texts


def test_the_file_may_be_golden(folders, tmp_path):
    bug = PLANTED["llama"]["transposed"]
    file = convert(folders("llama"), tmp_path / "m.gguf", "llama", "Q8_0", bug)
    (found,) = ld.doctor(file, folders("llama"), progress=False).result.suspicious
    assert "transposed" in found.golden
    assert found.mine == "another form of them"


def test_the_command_exits_with_the_verdict(folders, tmp_path, capsys):
    file = convert(folders("qwen2"), tmp_path / "m.gguf", "qwen2", "Q8_0")
    assert main(["doctor", str(folders("qwen2")), str(file)]) == 0
    bug = PLANTED["qwen2"]["reordered"]
    file = convert(folders("qwen2"), tmp_path / "m.gguf", "qwen2", "Q8_0", bug)
    assert main(["doctor", str(folders("qwen2")), str(file)]) == 1
    assert "reordered into pairs" in capsys.readouterr().out


def test_a_file_that_is_cut_anywhere_is_told_in_one_line(folders, tmp_path):
    whole = convert(folders("qwen3"), tmp_path / "m.gguf", "qwen3").read_bytes()
    part = tmp_path / "part.gguf"
    head = whole.index(b"blk.0")
    for length in (*range(0, head, 97), head, head + 200, len(whole) // 2, len(whole) - 33):
        part.write_bytes(whole[:length])
        with pytest.raises(CorruptDumpError, match=r"part\.gguf can't be read") as error:
            ld.doctor(folders("qwen3"), part, progress=False)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_values_that_are_not_finite_are_told(folders, tmp_path, bad):
    name = f"{L1}self_attn.v_proj.weight"
    bug = Bug("", "", before=put(name, lambda w: torch.where(w == w.max(), bad, w)))
    file = convert(folders("llama"), tmp_path / "m.gguf", "llama", "F16", bug)
    ((_, found, texts),) = suspicious(folders("llama"), file)
    assert found == f"values of {name}"
    assert "1 of 32,768 elements are not finite" in texts
