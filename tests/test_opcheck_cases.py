"""`opcheck -c`: a csv names the calls that are checked."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llmdebug_nb as ld
from layout_files import write
from llmdebug_nb.app.opcheck import cases
from llmdebug_nb.app.opcheck.choosing import Call, Choice, calls_of
from llmdebug_nb.cli import main
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.records import CallKey
from models import llama
from recordings import record
from test_opcheck_atb import W, X, bin_bytes

HEAD = "CaseNum|CaseName|OpName|OpParam|InNum|OutDType\n"


def _llama():
    return record(model := llama(), lambda: model(torch.tensor([[1, 2, 3]])), mode="api")


def _atb(tmp_path):
    """Two linear operations of one layer in two rounds, without op_param.json."""
    for number in (0, 1):
        for at in (0, 1):
            name = f"tensors/0_42/{number}/3_Layer/{at}_LinearOperation"
            folder = tmp_path / "msit_dump_20240101_000000" / name
            write(folder / "before/intensor0.bin", bin_bytes(X))
            write(folder / "before/intensor1.bin", bin_bytes(W))
            made = (X.astype(np.float64) @ W.T.astype(np.float64)).astype(np.float32)
            write(folder / "after/outtensor0.bin", bin_bytes(made))
    return tmp_path


def test_msits_csv_chooses_operations_and_gives_the_parameters_that_the_dump_lacks(tmp_path):
    dump, table = _atb(tmp_path / "dump"), tmp_path / "operation_tensors_0.csv"
    given_ = json.dumps({"transposeB": True, "hasBias": False})
    table.write_text(f"{HEAD}1|c|LinearOperation_3_1|{given_}|2|float\n")
    assert ld.opcheck(dump).result.checked == 0
    result = ld.opcheck(dump, cases=table).result
    assert [(c.id, c.key.step, c.verdict) for c in result.calls] == [
        ("3_1", 0, "right"),
        ("3_1", 1, "right"),
    ]
    turned = json.dumps({"transposeB": False, "hasBias": False})
    table.write_text(f"{HEAD}1|c|LinearOperation_3_1|{turned}|2|float\n")
    assert ld.opcheck(dump, cases=table).result.checked == 0  # the shapes do not fit
    table.write_text(f"{HEAD}1|c|LinearOperation_3_1|{{|2|float\n")
    (one, *_) = ld.opcheck(dump, cases=table).result.calls
    assert "no JSON object" in one.detail


def test_the_csv_of_a_check_chooses_the_same_calls_in_one_process_and_in_two(tmp_path):
    run = _llama()
    whole = ld.opcheck(run, output=tmp_path)
    rows = list(csv.reader(whole.paths[0].open()))
    table = tmp_path / "some.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([rows[0], *rows[5:9], rows[5]])
    wanted = whole.result.calls[4:8]
    for jobs in (1, 2):
        assert ld.opcheck(run, cases=table, jobs=jobs, output=tmp_path).result.calls == wanted
    assert ld.opcheck(run, cases=whole.paths[0], output=tmp_path).result.calls == whole.result.calls


def test_paths_of_our_own_tables_choose_calls_and_other_options_choose_among_them(tmp_path):
    run, table = _llama(), tmp_path / "ops.csv"
    paths = [call.key.path for call in calls_of(run, Choice())][:6]
    table.write_text("OpName\n" + "".join(f"{path}\n" for path in paths))
    assert {c.key.path for c in ld.opcheck(run, cases=table).result.calls} == set(paths)
    one = ld.opcheck(run, cases=table, paths=paths[2]).result
    assert {c.key.path for c in one.calls} == {paths[2]}


def test_rows_without_a_call_are_counted_and_named(tmp_path, capsys):
    run, table = _llama(), tmp_path / "ops.csv"
    path = calls_of(run, Choice())[3].key.path
    table.write_text(f"OpName|OpParam\nLinearOperation_9_1|\n{path}|\nmodel.gone|\n")
    assert main(["opcheck", "-i", str(run.path), "-c", str(table), "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 operator call" in out
    assert "not found: 2 rows" in out
    assert "line 2: LinearOperation_9_1; line 4: model.gone" in out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "can't read .*No such file"),
        (b"", "no column op_id and op_name"),
        (b"a,b\n1,2\n", "no column op_id and op_name; expected msit's"),
        (b"op_id\n3\n", "no column op_name"),
        (b"OpName|OpParam\n", "has no rows"),
        (b"OpName|OpParam\n |{}\n", "names no operator in line 2"),
        (b"OpName\nLinearOperation_9_9\n", "none of 1 rows names a call of .*such as line 2"),
        (b"PK\x03\x04\xff\xfe", "is no text"),
        (b"op_id,op_name\n1,\x00\n", "none of|can't be read"),
        (b"op_id,op_name\n1,\"" + b"x" * 200_000, "can't be read: field larger"),
    ],
)  # fmt: skip
def test_a_file_that_names_no_calls_is_an_error_that_says_what_is_expected(
    content, says, tmp_path, capsys
):
    run, table = _llama(), tmp_path / "bad.csv"
    if content is not None:
        table.write_bytes(content)
    with pytest.raises(OptionError, match=says):
        ld.opcheck(run, cases=table)
    assert main(["opcheck", "-i", str(run.path), "-c", str(table)]) == 3
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(OptionError, match="can't read"):
        ld.opcheck(run, cases=tmp_path)


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n|\x00\\"), min_size=1).filter(
    lambda text: text.strip() == text and "#" not in text and text[0] != "'"
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(NAMES, st.integers(0, 3)), min_size=1, max_size=8, unique=True), st.data()
)
def test_a_path_and_a_number_choose_exactly_that_call(places, data):
    calls = [
        Call(i, CallKey(0, 0, 0, "forward", path, number), "Aten.mm")
        for i, (path, number) in enumerate(places)
    ]
    wanted = data.draw(st.lists(st.sampled_from(calls), unique=True, min_size=1))
    text = "OpName|x\n" + "".join(f"{c.key.path}#{c.key.call}|\n" for c in wanted)
    chosen, absent = cases.choose(cases._cases(text, "f"), calls)
    assert {c.record for c in chosen} == {c.record for c in wanted}
    assert not absent
