"""``llmdebug msit``: lines of msit's."""

from __future__ import annotations

import contextlib
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from llmdebug_nb.app.upstream.msit_line import _COMMANDS, translated
from llmdebug_nb.cli import _parser, main
from models import llama, prompt


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("msit llm dump --exec 'bash run.sh' --type model tensor -er 0,1 -ids 2,3_1",
         "dump --exec 'bash run.sh' --type model tensor -er 0,1 -ids 2,3_1"),
        ("llm dump --exec 'python a.py' -ids 2, 3_1 -child False",
         "dump --exec 'python a.py' -ids 2, 3_1 -child False"),
        ("llm compare -gp golden -mp mine -cl layer --op-mapping-file maps",
         "compare -gp golden -mp mine -cl layer --op-mapping-file maps"),
        ("opcheck -i d --precision-metric abs kl --atb-rerun -j 2",
         "opcheck -i d -metric abs kl -rerun -j 2"),
        ("ait llm errcheck --exec='python a.py' --type overflow --exit -o out",
         "errcheck --exec 'python a.py' --type overflow --exit -o out"),
        ("llm logitscmp --golden-path a -mp b -o out",
         "logits a b --rule msit --csv out/logits_cmp_res.csv"),
    ],
)  # fmt: skip
def test_a_line_becomes_ours_and_our_parser_takes_it(line, ours):
    words = translated(shlex.split(line)).words
    assert shlex.join(words) == ours
    assert _parser().parse_args(words).run is not None


def test_options_without_effect_are_named():
    found = translated(shlex.split("llm opcheck -i d -device 1 -l debug"))
    assert found.words == ["opcheck", "-i", "d"]
    assert found.remarks == [
        "-device has no effect: the reference is computed on the CPU",
        "-l has no effect: its messages have one level",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("llm opcheck -i d -opt", "-opt has no equivalent: it is of ATB's own"),
        ("llm dump --exec x --nosuch 1", "--nosuch is unknown, or has no equivalent"),
        ("llm transform -s x", "msit transform has no equivalent here: it writes ATB's"),
        ("llm compar -gp a", "nearest: compare"),
        ("llm", "no command"),
        ("llm compare golden -mp b", "'golden' stands before the first option"),
        ("llm logitscmp -gp a", "-mp is missing"),
    ],
)
def test_what_has_no_equivalent_is_an_error(line, says, capsys):
    assert main(["msit", *shlex.split(line)]) == 3
    text = capsys.readouterr().err
    assert says in text
    assert "runs:" not in text


def test_the_line_is_said_before_it_runs(tmp_path, capsys):
    model = llama()
    with ld.dump(model, name="golden"):
        model(prompt())
    line = ["llm", "compare", "-gp", "golden", "-mp", "nosuch"]
    assert main(["msit", *line]) == 3
    text = capsys.readouterr().err
    assert text.index("runs: llmdebug compare -gp golden -mp nosuch") < text.index(
        "no run 'nosuch'"
    )
    assert main(["msit", *line[:-1], "golden", "-o", str(tmp_path)]) == 0
    assert list(tmp_path.glob("msit_cmp_report_*.csv"))


@given(st.sampled_from(sorted(_COMMANDS)), st.lists(st.text(max_size=8), max_size=5))
def test_any_words_are_translated_or_refused(name, words):
    with contextlib.suppress(ld.errors.OptionError):
        found = translated(["llm", name, *words])
        assert found.words[0] == _COMMANDS[name].ours
