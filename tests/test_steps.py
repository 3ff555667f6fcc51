"""The numbering of tokens, for every way to generate."""

from __future__ import annotations

import pytest
import torch

import llmdebug_nb as ld
from models import ARCHITECTURES, generate, gpt2, llama, prompt, t5


def _steps(run):
    return [(c.generation, c.step, c.kind) for c in run.root_calls()]


def _numbers(run):
    return [(c.generation, c.step) for c in run.root_calls()]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_prefill_is_0_and_each_decode_one_more(architecture):
    model = ARCHITECTURES[architecture]()
    with ld.dump(model, name="r", tokens="all") as run:
        generate(model, new=4)
    assert _steps(run) == [(0, 0, "prefill"), (0, 1, "decode"), (0, 2, "decode"), (0, 3, "decode")]
    assert [c.query for c in run.root_calls()] == [7, 1, 1, 1]
    assert [c.total for c in run.root_calls()] == [7, 8, 9, 10]


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"num_beams": 3},
        {"cache_implementation": "static", "disable_compile": True},
    ],
    ids=["sampling", "beams", "static cache"],
)
def test_steps_are_the_same_with(options):
    model = llama()
    with ld.dump(model, name="r", tokens="all") as run:
        generate(model, new=4, **options)
    assert _steps(run) == [(0, 0, "prefill"), (0, 1, "decode"), (0, 2, "decode"), (0, 3, "decode")]
    assert {c.batch for c in run.root_calls()[1:]} == {options.get("num_beams", 1)}


def test_without_a_cache_every_step_is_a_full_pass():
    model = llama()
    with ld.dump(model, name="r", tokens="all") as run:
        generate(model, new=3, use_cache=False)
    assert _steps(run) == [(0, 0, "prefill"), (0, 1, "full"), (0, 2, "full")]
    assert [c.query for c in run.root_calls()] == [7, 8, 9]


def test_chunks_of_one_prefill_share_step_0_and_are_told_apart_by_call():
    model = llama()
    with ld.dump(model, name="r", tokens="all") as run:
        generate(model, new=3, prefill_chunk_size=3)
    kinds = [kind for _, _, kind in _steps(run)]
    steps = [step for _, step, _ in _steps(run)]
    chunks = kinds.count("prefill")
    assert chunks == 3  # 3 + 3 + 1 tokens; the last chunk has one row and is no decode
    assert steps == [0] * chunks + [1, 2]
    assert [run.tensor("lm_head", step=0, call=i).shape[0] for i in range(chunks)] == [1] * chunks
    assert [run.tensor("model.embed_tokens", step=0, call=i).shape[1] for i in range(chunks)] == [
        3,
        3,
        1,
    ]


def test_assisted_decoding_numbers_the_iterations_of_the_main_model():
    model, assistant = llama(), llama(seed=1, hidden_size=16, num_hidden_layers=1)
    with ld.dump(model, name="r", tokens="all") as run:
        generate(model, new=5, assistant_model=assistant)
    calls = run.root_calls()
    assert [c.step for c in calls] == list(range(len(calls)))
    assert calls[0].kind == "prefill"
    assert {c.kind for c in calls[1:]} <= {"verify", "decode"}
    assert not any("~" in path for path in run.to_pandas().path)


def test_assisted_decoding_with_nothing_given_records_both_models_apart():
    model, assistant = llama(), llama(seed=1, hidden_size=16, num_hidden_layers=1)
    with ld.dump(name="r", tokens="all") as run:
        generate(model, new=4, assistant_model=assistant)
    paths = set(run.to_pandas().path)
    assert "model.layers.1.mlp" in paths
    assert "LlamaForCausalLM~1.model.layers.0.mlp" in paths
    assert run.tensor("lm_head", step=0).shape[-1] == 96


def test_prompt_lookup_numbers_its_iterations():
    model = llama()
    with ld.dump(model, name="r", tokens="all") as run:
        generate(model, torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]]), new=4, prompt_lookup_num_tokens=2)
    assert [c.step for c in run.root_calls()] == list(range(len(run.root_calls())))


def test_a_further_call_within_a_token_is_extra_and_keeps_the_step():
    model = llama()
    with ld.dump(model, name="r", tokens="all") as run:
        generate(model, new=3, guidance_scale=1.5)
    by_step: dict[int, list[str]] = {}
    for _, step, kind in _steps(run):
        by_step.setdefault(step, []).append(kind)
    assert by_step == {0: ["prefill", "extra"], 1: ["decode", "extra"], 2: ["decode", "extra"]}
    assert run.tensor("lm_head", step=1, call=1) is not None


def test_a_custom_loop_counts_root_calls():
    model = llama()
    with ld.dump(model, name="r", tokens="all") as run:
        ids, cache = prompt(), None
        for _ in range(3):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
    assert _steps(run) == [(0, 0, "prefill"), (0, 1, "decode"), (0, 2, "decode")]


def test_how_many_tokens_a_bare_call_sees_is_known_if_it_has_no_cache():
    model, ids = llama(), prompt(7)
    with ld.dump(model, name="r", tokens="all") as run, torch.no_grad():
        cache = model(ids).past_key_values
        model(ids[:, :1], past_key_values=cache)
        model(ids, None, None, cache)
        model(ids, use_cache=False)
    assert [c.total for c in run.root_calls()] == [7, None, None, 7]


def test_bare_calls_before_a_generate_are_warm_ups_and_do_not_shift_its_steps():
    model = llama()
    with ld.dump(model, name="r", tokens="0-1") as run:
        model(prompt())
        generate(model, new=3)
    assert _steps(run) == [(-1, 0, "warmup"), (0, 0, "prefill"), (0, 1, "decode"), (0, 2, "decode")]
    assert {
        (g, s) for g, s in zip(run.to_pandas().generation, run.to_pandas().step, strict=True)
    } == {
        (-1, 0),
        (0, 0),
        (0, 1),
    }


def test_warm_up_generations_can_be_declared():
    model = llama()
    with ld.dump(model, name="r", tokens="0", warmup=2) as run:
        for _ in range(3):
            generate(model, new=2)
    assert [g for g, s in _numbers(run)] == [-2, -2, -1, -1, 0, 0]
    assert [k for _, _, k in _steps(run)] == ["warmup"] * 4 + ["prefill", "decode"]


def test_declared_warm_up_of_a_bare_loop():
    model = llama()
    with ld.dump(model, name="r", tokens="0-1", warmup=1) as run:
        for _ in range(3):
            model(prompt())
    assert _numbers(run) == [(-1, 0), (0, 0), (0, 1)]


def test_each_generate_counts_its_own_steps():
    model = llama()
    with ld.dump(model, name="r", tokens="1") as run:
        generate(model, new=2)
        generate(model, prompt(seed=5), new=2)
    frame = run.to_pandas()
    assert set(zip(frame.generation, frame.step, strict=True)) == {(0, 1), (1, 1)}
    first, second = (run.tensor("model.embed_tokens", step=1, generation=g) for g in (0, 1))
    assert first.shape == second.shape == (1, 1, 32)


def test_an_encoder_runs_in_step_0_and_is_not_lost():
    model = t5()
    with ld.dump(model, name="r", tokens="0-1") as run:
        generate(model, new=3)
    assert [(c.step, c.kind) for c in run.root_calls()] == [
        (0, "encoder"),
        (0, "prefill"),
        (1, "decode"),
        (2, "decode"),
    ]
    assert run.tensor("encoder.block.0", step=0) is not None
    assert run.tensor("decoder.block.0", step=1) is not None


def test_a_part_of_the_model_called_alone_is_recorded():
    model = llama()
    with ld.dump(model, name="r") as run:
        model.model(prompt())
    assert run.tensor("model.layers.0.mlp") is not None


@pytest.mark.parametrize("tokens", ["all", "0-1"])
def test_a_part_that_is_called_behind_the_model_belongs_to_its_step(tokens):
    model = llama()
    with ld.dump(model, name="r", tokens=tokens) as run, torch.no_grad():
        for seed in range(3):
            model.lm_head(model.model(prompt(seed=seed)).last_hidden_state)
    kept = [0, 1, 2] if tokens == "all" else [0, 1]
    frame = run.to_pandas()
    for path in ("model.norm", "lm_head"):
        assert sorted(set(frame[frame.path == path].step)) == kept
    assert _numbers(run) == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (0, 2)]


def test_a_part_that_is_called_before_the_model_belongs_to_its_step():
    model = t5()
    with ld.dump(model, name="r", tokens="all") as run, torch.no_grad():
        for seed in range(3):
            states = model.encoder(prompt(seed=seed))
            model(encoder_outputs=states, decoder_input_ids=prompt(seed=seed))
    assert _numbers(run) == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (0, 2)]


def test_steps_that_were_not_asked_for_leave_no_hook_on_the_modules_inside():
    model = gpt2()
    counts = []
    inside = model.transformer.h[0].mlp

    def look(*_):
        counts.append(len(inside._forward_hooks))

    watcher = model.lm_head.register_forward_pre_hook(look)
    with ld.dump(model, name="r", tokens="1-2"):
        generate(model, new=5)
    watcher.remove()
    assert counts == [0, 1, 1, 0, 0]


def test_generation_in_another_thread_is_recorded():
    import threading

    model = llama()
    with ld.dump(model, name="r", tokens="all") as run:
        thread = threading.Thread(target=generate, args=(model,), kwargs={"new": 3})
        thread.start()
        thread.join()
    assert [c.step for c in run.root_calls()] == [0, 1, 2]
