"""The magics, in a real IPython shell."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError

import llmdebug_nb as ld
from llmdebug_nb.core import constants
from llmdebug_nb.core.bars import Stages
from llmdebug_nb.notebook.explore import show_report
from models import hooks_left, llama, prompt


@pytest.fixture
def shell(ipython):
    ipython.user_ns.update(model=llama(), broken=llama(), ids=prompt(), torch=torch)
    ipython.user_ns["broken"].model.layers[1].mlp.act_fn = torch.nn.GELU()
    return ipython


def _run(shell, capsys, cell):
    """Return (result, stdout + stderr) of a cell."""
    capsys.readouterr()
    result = shell.run_cell(cell, store_history=True)
    out, err = capsys.readouterr()
    return result, out + err


def _line(text):
    """Return the line of a UsageError; fail on a traceback or a second line."""
    lines = [line for line in text.strip().splitlines() if line]
    assert len(lines) == 1, text
    assert lines[0].startswith("UsageError: "), text
    return lines[0]


def test_the_cell_runs_in_the_users_namespace_its_result_shows_and_one_line_says_what_was_kept(
    shell, capsys
):
    result, text = _run(
        shell,
        capsys,
        "%%llmdump model --tokens 0-3 --name golden\nout = model(ids)\nout.logits.shape",
    )
    assert result.success
    assert result.result == torch.Size([1, 7, 96])
    assert "Out[" in text
    assert shell.user_ns["out"].logits.shape == (1, 7, 96)
    (line,) = [line for line in text.splitlines() if line.startswith("golden:")]
    assert "78 tensors of 1 step" in line
    assert "golden" in line.split(" in ")[1]
    assert "kB" in line
    assert isinstance(shell.user_ns["golden"], ld.Run)


def test_a_semicolon_hides_the_result_as_usual(shell, capsys):
    result, _ = _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids);")
    assert result.result is None


def test_cells_keep_ipython_syntax_and_definitions(shell, capsys):
    result, text = _run(
        shell,
        capsys,
        "%%llmdump model --name golden\n!echo from the shell\ndef f(x):\n    return x + "
        "1\nmodel(ids)\nf(1)",
    )
    assert result.result == 2
    assert "from the shell" in text
    assert shell.user_ns["f"](2) == 3


def test_compare_says_verdict_first_divergence_and_blame_once(shell, capsys, tmp_path):
    _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids)")
    _run(shell, capsys, "%%llmdump --name mine\nbroken(ids)")
    files = tmp_path / "d.csv", tmp_path / "r.html"
    result, text = _run(
        shell, capsys, f"%llmcompare golden mine --csv {files[0]} --html {files[1]}"
    )
    assert isinstance(result.result, ld.Report)
    assert text.count("golden against mine: diverged") == 1
    assert "First to diverge: model.layers.1.mlp.act_fn" in text
    assert "→ Made in model.layers.1.mlp.act_fn (GELU" in text  # no line of torch is named
    assert all(file.exists() and f"written: {file}" in text for file in files)
    _, again = _run(shell, capsys, "_")
    assert "golden against mine: diverged" in again


def test_a_cell_takes_msits_form_of_a_comparison(shell, capsys, tmp_path):
    _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids)")
    _run(shell, capsys, "%%llmdump --name mine\nbroken(ids)")
    result, _ = _run(shell, capsys, f"%llmcompare -gp golden -mp mine -cl module -o {tmp_path}")
    assert result.result.verdict == "diverged"
    (table,) = tmp_path.glob("msit_cmp_report_*.csv")
    assert "golden_data_path" in table.read_text(encoding="utf-8")


def test_what_is_expected_is_said_and_taken_back_on_the_line_that_compares(shell, capsys):
    _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids)")
    _run(shell, capsys, "%%llmdump --name mine\nbroken(ids)")
    result, text = _run(
        shell, capsys, "%llmcompare golden mine --expect 'model.layers.1*' --comment 'a known bug'"
    )
    assert result.result is not None, text
    assert result.result.expected[0].comment == "a known bug"
    assert text.startswith("golden against mine: ")
    result, _ = _run(shell, capsys, "%llmcompare golden mine")
    assert [mark.comment for mark in result.result.expected] == ["a known bug"]
    result, text = _run(shell, capsys, "%llmcompare golden mine --unexpect model.layers.1*")
    assert result.result.expected == []
    assert "diverged" in text
    assert "not marked as expected" in _line(
        _run(shell, capsys, "%llmcompare golden mine --unexpect nothing.*")[1]
    )


def test_in_a_notebook_one_line_with_verdict_and_place_stands_above_the_explorer(
    shell, capsys, monkeypatch
):
    _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids)")
    _run(shell, capsys, "%%llmdump --name mine\nbroken(ids)")
    report, shown = ld.compare("golden", "mine"), []
    monkeypatch.setattr(
        "IPython.display.display", lambda what: shown.append((capsys.readouterr().out, what))
    )
    show_report(report, SimpleNamespace(kernel=object()))
    [(text, explorer)] = shown
    assert re.fullmatch(
        r"golden against mine: diverged\. Made in model\.layers\.1\.mlp\.act_fn "
        r"\(GELU, was SiLUActivation\)\n",
        text,
    )
    assert type(explorer).__name__ == "Explorer"


def test_in_a_notebook_the_first_of_many_steps_is_answered_while_the_others_are_compared(
    shell, capsys, monkeypatch
):
    for name, call in (("golden", "model(ids)"), ("mine", "broken(ids)")):
        _run(shell, capsys, f"%%llmdump --name {name}\n{call}\n{call}")
    said: list[str] = []
    monkeypatch.setattr(constants, "FIRST_STEP_FROM", 1)
    monkeypatch.setattr(Stages, "say", lambda self, text: said.append(text))
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    monkeypatch.setattr("IPython.display.display", lambda what: None)
    _run(shell, capsys, "%llmcompare golden mine")
    [text] = said
    assert text.startswith("Its first step alone: golden against mine: diverged. Made in model.")


def test_a_variable_alone_shows_the_run(shell, capsys):
    _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids)")
    _, text = _run(shell, capsys, "golden")
    assert "Run golden" in text
    assert "model.embed_tokens" in text


def test_explore_gives_the_widget_of_a_run_or_a_report(shell, capsys):
    _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids)")
    result, text = _run(shell, capsys, "%llmexplore golden")
    assert type(result.result).__name__ == "Explorer"
    assert "model.embed_tokens" in text  # the text fallback of a shell without a front end
    _run(shell, capsys, "report = %llmcompare golden golden")
    result, _ = _run(shell, capsys, "%llmexplore report")
    assert "match" in repr(result.result)


def test_runs_are_listed_and_deleted(shell, capsys):
    assert "There are no runs yet" in _run(shell, capsys, "%llmruns")[1]
    _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids)")
    assert "golden" in _run(shell, capsys, "%llmruns")[1]
    assert "deleted" in _run(shell, capsys, "%llmruns --delete golden")[1]
    assert "There are no runs yet" in _run(shell, capsys, "%llmruns")[1]


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("%%llmdump model --tokens 3-1\n1", "the range 3-1 runs backwards"),
        ("%%llmdump model --tokens x\n1", "'x' is neither a number nor a range; write 0-3"),
        ("%%llmdump --name golden\n1 + 1", "no module was called"),
        ("%%llmdump model --layers model.layer.*\nmodel(ids)", "nearest: model.layers"),
        ("%%llmdump model --types Linaer\nmodel(ids)", "Linear"),
        ("%%llmdump model --tokens 9\nmodel(ids)", "tokens 9 never came; steps seen: 0"),
        ("%%llmdump nosuch\nmodel(ids)", "NameError"),
        (
            "%%llmdump ids\nmodel(ids)",
            "an onnxruntime.InferenceSession, an openvino.CompiledModel, "
            "a vllm.LLM or a llama_cpp.Llama, got Tensor",
        ),
        ("%%llmdump model --name a/b\nmodel(ids)", "name 'a/b'"),
        ("%%llmdump --nosuch\n1", "unrecognized arguments"),
        ("%%llmdump --tokns 1\n1", "nearest: --tokens"),
        ("%%llmdump model --ids 9, 1_9\nmodel(ids)", "no call has the id 9"),
        ("%%llmdump model --rounds 1,1\nmodel(ids)", "rounds 1,1 never came"),
        ("%%llmdump model --opname nosuch\nmodel(ids)", "begins with opname 'nosuch'"),
        ("%%llmdump model --time 9\nmodel(ids)", "time 9: expected 0 (before)"),
        ("%%llmdump model --device meta\nmodel(ids)", "meta was asked for, and the models ran"),
        ("%%llmdump model --ranks 1-3\nmodel(ids)", "do not include the rank of this process"),
        ("%%llmdump model --pth\nmodel(ids)", "--pth reaches the Pythons that a command starts"),
        ("%%llmdump model -tiling\nmodel(ids)", "-tiling is of fused kernels: add --graph"),
        ("%llmdump of", "expected on, off or status; nearest: off"),
        ("%llmdump", "%llmdump: expected on, off or status"),
        ("%llmdump off", "no recording is running"),
        ("%llmdump on nosuch", "NameError"),
        ("%%llmdump model --part inputs\n1", "invalid choice"),
        ("%%llmdump model --path /dev/null/x\nmodel(ids)", "can't write the dump"),
        ("%%llmdump model --name x\nawait model(ids)", "await at the top level"),
        ("%%llmdump modle\nmodel(ids)", "nearest: model"),
        ("%llmcompare golden", "mine (MINE or -mp) is missing"),
        ("%llmcompare nosuch other", "no run 'nosuch'"),
        ("%llmexplore nosuch", "no run 'nosuch'"),
        ("%llmruns --delete nosuch", "no run 'nosuch'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_hook(shell, capsys, cell, says):
    _, text = _run(shell, capsys, cell)
    assert says in _line(text)
    assert hooks_left(shell.user_ns["model"]) == 0
    assert ld.runs() == []


def test_runs_without_a_common_site_are_incomparable_and_damaged_ones_one_line(shell, capsys):
    _run(shell, capsys, "%%llmdump model --name a --layers lm_head\nmodel(ids)")
    _run(shell, capsys, "%%llmdump model --name b --layers model.embed_tokens\nmodel(ids)")
    text = _run(shell, capsys, "%llmcompare a b")[1]
    assert "incomparable" in text
    assert "no site in common" in text
    index = next(shell.user_ns["a"].path.glob("rank*/index.sqlite"))
    index.write_bytes(index.read_bytes()[:100])
    del shell.user_ns["a"]
    assert "damaged" in _line(_run(shell, capsys, "%llmexplore a")[1])


def test_an_error_in_the_cell_is_the_news_and_what_was_recorded_stays(shell, capsys):
    result, text = _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids)\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert "golden: 78 tensors of 1 step" in text
    assert "incomplete: ZeroDivisionError" in text
    assert "magics.py" not in text
    assert "namespace.py" not in text
    assert len(shell.user_ns["golden"]) == 78
    assert hooks_left(shell.user_ns["model"]) == 0


def test_a_variable_of_the_user_is_never_overwritten(shell, capsys):
    _, text = _run(shell, capsys, "%%llmdump model --name ids\nmodel(ids)")
    assert "was left alone" in text
    assert torch.equal(shell.user_ns["ids"], prompt())
    assert len(ld.open_run("ids")) == 78


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("%%llmdump --to", ["--tokens"]),
        ("%%llmdump --part ", ["both", "in", "out"]),
        ("%%llmdump mod", ["model"]),
        ("%%llmdump model --layers model.layers.0.ml", ["model.layers.0.mlp"]),
        ("%%llmdump model --types Llama", ["LlamaAttention", "LlamaDecoderLayer"]),
        ("%%llmdump model --mode module+a", ["module+api", "module+api+aten", "module+aten"]),
        ("%%llmdump --tokens a", ["all"]),
        ("%llmcompare golden golden --calibrate ", ["auto", "golden"]),
        ("%llmruns --delete ", ["golden"]),
        ("%llmcompare gol", ["golden"]),
        ("%llmcompare golden golden --h", ["--html"]),
        ("%llmexplore gol", ["golden"]),
        ("%llmruns --del", ["--delete"]),
    ],
)
def test_tab_completes(shell, capsys, line, offers):
    _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids)")
    with provisionalcompleter():
        got = [c.text for c in shell.Completer.completions(line, len(line))]
    assert got[: len(offers)] == offers


def test_a_report_that_was_assigned_shows_when_asked_for(shell, capsys):
    _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids)")
    _run(shell, capsys, "report = %llmcompare golden golden")
    for _ in range(2):
        assert "golden against golden: match" in _run(shell, capsys, "report")[1]


def test_a_builtin_is_never_overwritten(shell, capsys):
    _, text = _run(shell, capsys, "%%llmdump model --name len\nmodel(ids)")
    assert "ld.open_run('len')" in text
    assert "len" not in shell.user_ns


def test_a_question_mark_explains(shell, capsys):
    shell.run_line_magic("pinfo", "%%llmdump")
    text = capsys.readouterr().out
    for word in ("--tokens", "--layers", "Record the model that runs in this cell"):
        assert word in text


def test_loading_twice_and_unloading_do_no_harm(shell, capsys):
    before = len(shell.Completer.custom_matchers)
    shell.run_line_magic("reload_ext", "llmdebug_nb")
    assert len(shell.Completer.custom_matchers) == before
    shell.run_line_magic("unload_ext", "llmdebug_nb")
    assert len(shell.Completer.custom_matchers) == before - 1
    assert "llmdump" not in shell.magics_manager.magics["cell"]
    shell.run_line_magic("load_ext", "llmdebug_nb")


def test_recording_is_switched_on_and_off_across_cells(shell, capsys):
    _, text = _run(shell, capsys, "%llmdump on model --name golden --tokens all --mode module+aten")
    assert text.strip() == "golden: recording until %llmdump off"
    _run(shell, capsys, "model(ids);")
    _, text = _run(shell, capsys, "%llmdump status")
    assert text.startswith("golden: recording, step 0 of 1 step, ")
    assert _line(_run(shell, capsys, "%llmdump on model")[1]) == (
        "UsageError: %llmdump on: golden is being recorded; end it with %llmdump off"
    )
    _run(shell, capsys, "y = model(ids).logits * 2")
    _, text = _run(shell, capsys, "%llmdump off")
    assert "of 2 steps" in text
    run = shell.user_ns["golden"]
    assert sorted(set(run.to_pandas().step)) == [0, 1]
    assert hooks_left(shell.user_ns["model"]) == 0
    assert (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()) == (0, 0)
    assert "no recording is running" in _run(shell, capsys, "%llmdump off")[1]
    assert _run(shell, capsys, "%llmdump status")[1] == "No recording is running.\n"


def test_an_empty_recording_says_so_when_it_is_switched_off(shell, capsys):
    _run(shell, capsys, "%llmdump on model --name golden")
    assert "nothing was recorded" in _line(_run(shell, capsys, "%llmdump off")[1])


def test_operators_gradients_and_budgets_are_options_of_the_magic(shell, capsys):
    _, text = _run(
        shell,
        capsys,
        "%%llmdump model --name ops --mode api --apis linear,!silu --phase backward "
        "--max-bytes 1kB\n"
        "model(input_ids=ids, labels=ids).loss.backward()",
    )
    table = shell.user_ns["ops"].to_pandas()
    assert set(table.phase) == {"backward"}
    assert set(table.op) == {"Functional.linear"}
    assert "not kept: over the budget of 1.0 kB (max_bytes)" in text


def test_a_recording_holds_the_lines_that_ran_and_not_the_text_of_the_cell_around_them(
    shell, capsys
):
    cell = "%%llmdump model --mode module+api --name golden\nsecret = 'an otter'\nmodel(ids)"
    _run(shell, capsys, cell)
    run = shell.user_ns["golden"]
    paths = run.operators().path
    frames = [frame for path in paths for frame in run.stack(path)]
    assert any("<module>" in frame for frame in frames)
    assert not any("IPython" in frame for frame in frames)
    kept = [file.read_bytes() for file in run.path.rglob("*") if file.is_file()]
    assert not any(b"otter" in each for each in kept)


def test_an_error_of_a_call_is_one_line_in_a_notebook(shell, capsys):
    shell.run_cell("import llmdebug_nb as ld\nld.open_run('golde')")
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("UnknownRunError: ")
    assert lines[0].endswith("(line 2)")


def test_a_command_is_run_shown_and_recorded_and_its_run_is_a_variable(
    shell, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a program.py").write_text(
        "import sys, torch; torch.nn.Linear(2, 2)(torch.ones(1, 2)); print(sys.argv[1:]); "
        "print('e', file=sys.stderr); sys.exit(3)",
        encoding="utf-8",
    )
    shell.run_line_magic("llmdump", "--exec \"python 'a program.py' 'a b'\" --name ran -stp 1")
    out, err = capsys.readouterr()
    assert out.startswith("['a b']\nran: 1 tensor of 1 step")
    assert err == "e\nllmdump: the command ended with status 3\n"
    assert list(shell.user_ns["ran"].to_pandas().role) == ["output"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--exec", "expected one argument"),
        ("--exec 'true' --bogus", "unrecognized arguments: --bogus"),
        ("--exec 'true' -er 1,0", "runs backwards"),
        ("--exec 'true", "No closing quotation"),
        ("--exec 'true | false'", "there is no shell"),
    ],
)
def test_commands_that_make_no_sense_are_refused_in_one_line(shell, line, message):
    with pytest.raises(UsageError, match=message):
        shell.run_line_magic("llmdump", line)


@pytest.mark.parametrize(
    ("flags", "records"),
    [
        ("--ids 0_1, 0_2", {"0_1", "0_2"}),
        ("--ids 0_1,0_2 -child false", {"0_1", "0_2"}),
        ("--opname linear --rounds 0,0 --ranks 0 --device cpu", {"Linear"}),
        ("--time 0", {"input"}),
    ],
)
def test_flags_of_the_command_select_in_a_cell_what_they_select_of_a_command(
    shell, capsys, flags, records
):
    _, text = _run(shell, capsys, f"%%llmdump model {flags} --name golden\nmodel(ids);")
    run = shell.user_ns["golden"]
    table, types = run.to_pandas(), {node.path: node.type for node in run.nodes}
    if "--ids" in flags:
        seen = {run.id_of(record.site) for record in run.records()}
        alone = "-child" in flags
        assert {each for each in seen if each.count("_") == 1} == records, text
        assert (seen == records) is alone
        assert all(each.startswith(tuple(records)) for each in seen)
    elif "--time" in flags:
        assert set(table.role) == records
    else:
        assert {types[path] for path in table.path} == records


def test_files_of_a_type_are_written_when_the_cell_or_the_recording_ends(shell, capsys):
    _, text = _run(shell, capsys, "%%llmdump model --type model layer --name golden\nmodel(ids);")
    assert re.match(r"golden: \d+ tensors of 1 step, statistics only", text), text
    assert "execution ids, for -ids:" in text
    folder = shell.user_ns["golden"].path
    assert len(list(folder.glob("model/*/*.json"))) == 1
    assert list(folder.glob("layer/*/*.json"))
    _run(shell, capsys, "%llmdump on model --type op -l error --name quiet")
    _run(shell, capsys, "model(ids);")
    assert _run(shell, capsys, "%llmdump off")[1] == ""
    assert list(shell.user_ns["quiet"].path.glob("operation_io_tensors/*/*.csv"))


def test_a_cell_takes_no_command(shell):
    with pytest.raises(UsageError, match="--exec records a command, not a cell"):
        shell.run_cell_magic("llmdump", "--exec true", "1")


def test_a_comparison_is_bound_to_report_unless_that_name_is_taken(shell, capsys):
    _run(shell, capsys, "%%llmdump model --name golden\nmodel(ids)")
    _run(shell, capsys, "%llmcompare golden golden")
    first = shell.user_ns["report"]
    assert shell.user_ns["_report"] is first
    _run(shell, capsys, "%llmcompare golden golden")
    assert shell.user_ns["report"] is not first  # a report of ours gives way
    shell.user_ns["report"] = "the user's own"
    _run(shell, capsys, "%llmcompare golden golden")
    assert shell.user_ns["report"] == "the user's own"
    assert shell.user_ns["_report"].verdict == "match"
