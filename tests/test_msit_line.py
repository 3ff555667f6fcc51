"""``llmdebug msit``: lines of msit's."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from llmdebug_nb.app.upstream.msit_line import _COMMANDS, translated
from llmdebug_nb.cli import command_parser, main
from models import llama, prompt


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("msit llm dump --exec 'bash run.sh' --type model tensor -er 0,1 -ids 2,3_1",
         "dump --exec 'bash run.sh' --type model tensor -er 0,1 -ids msit:2,msit:3_1"),
        ("llm dump --exec 'python a.py' -ids 2, 3_1 -child False",
         "dump --exec 'python a.py' -ids msit:2,msit:3_1 -child False"),
        ("llm compare -gp golden -mp mine -cl layer --op-mapping-file maps",
         "compare -gp golden -mp mine -cl layer --op-mapping-file maps"),
        ("opcheck -i d --precision-metric abs kl --atb-rerun -j 2",
         "opcheck -i d -metric abs kl -rerun -j 2"),
        ("ait llm errcheck --exec='python a.py' --type overflow --exit -o out",
         "errcheck --exec 'python a.py' --type overflow --exit -o out"),
        ("llm logitscmp --golden-path a -mp b -o out",
         "logits a b --rule msit --csv out/logits_cmp_res.csv"),
        ("msit llm logitscmp -gp a -mp b -cs 0.99 --l1-norm 0.1 -d bf16 --output-dir out",
         "logits a b --rule cosine_similarity=0.99,kl_divergence=0.0001,l1_norm=0.1"
         " --csv out/logits_cmp_res.csv"),
        ("msit llm dd --exec 'python a.py' -er 0,0,2,2", "dump --exec 'python a.py' -er 0,0,2,2"),
        ("msit llm cc -gp a -mp b -cl module", "compare -gp a -mp b -cl module"),
        ("msit llm oo -i d -ids 0_2,3", "opcheck -i d -ids 0_2,3"),
        ("msit llm ee --exec 'python a.py' --exit", "errcheck --exec 'python a.py' --exit"),
    ],
)  # fmt: skip
def test_a_line_becomes_ours_and_our_parser_takes_it(line, ours):
    words = translated(shlex.split(line)).words
    assert shlex.join(words) == ours
    assert command_parser(argparse.ArgumentParser).parse_args(words).run is not None


DOCUMENTED = """
msit llm dump --exec "bash run.sh" --type model tensor
msit llm dump --exec "bash run.sh" --type onnx
msit llm dump --exec "bash run.sh" --type model tensor stats
msit llm dump --exec "bash run.sh" --type model tensor -child False
msit llm dump --exec "bash run.sh" --type model tensor -er 1,1
msit llm dump --exec "bash run.sh" --type model tensor -ids 3
msit llm dump --exec "bash run.sh" --type model tensor -ids 3_1
msit llm dump --exec "bash run.sh" --enable-symlink
msit llm dump --exec "bash run.sh" --type layer
msit llm dump --exec "bash run.sh" --type model tensor -ids 31,63 -er 0,1000 -child False -stp 1
msit llm dump --exec "bash run.sh patches/models/modeling_xxx.py" --type layer tensor
msit llm dump --exec "bash run.sh" -er 3,5,7,7 -time 0 -opname self -sd -o aasx/sss
msit llm dump --exec "bash run.sh" -seed 1 --device-id 1 -l fatal -config c.json
msit llm errcheck --exec "bash run.sh" --type overflow --output out --exit --log-level info
msit llm compare -gp golden -mp mine
msit llm compare -gp golden -mp mine -o save
msit llm compare -gp dump/torch_tensors/cpu_1 -mp dump/tensors/0_7 -cl logits
msit llm compare --my-path dump/msit_ge_dump --golden-path dump/msit_fx_dump/data_dump
msit llm compare -gp golden -mp mine -alg a.py:foo b.py:foo2 -st -w -mf maps
msit llm opcheck -i out/msit_dump/tensors/0_7/0/
msit llm opcheck -i d -ids 24_1,2_3_5 -opname self,linear -metric kl cos_sim -rerun
msit llm opcheck -i d -pmode force_fp16 -j 8 -alg a.py:foo -o xx/xxx/xx
msit llm logitscmp -gp ./GPU/logits -mp ./NPU/logits
msit llm logitscmp -gp ./GPU/l -mp ./NPU/l -cs 0.9999 -kl 0.0001 -l1 0.001 -d fp32 -o result
""".strip().splitlines()


@pytest.mark.parametrize("line", DOCUMENTED)
def test_every_line_of_the_documents_is_taken(line):
    words = translated(shlex.split(line)).words
    assert command_parser(argparse.ArgumentParser).parse_args(words).run is not None


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
        ("llm compare -gp a -mp b --rank 1", "--rank has no equivalent: each rank is compared"),
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


def test_logitscmp_makes_its_folder_and_takes_limits(tmp_path):
    model = llama()
    with ld.dump(model, name="golden", path=tmp_path):
        model(prompt())
    sides = ["-gp", str(tmp_path / "golden"), "-mp", str(tmp_path / "golden")]
    line = ["msit", "llm", "logitscmp", *sides, "-kl", "0.5", "-o", str(tmp_path / "a/b")]
    assert main(line) == 0
    assert (tmp_path / "a/b/logits_cmp_res.csv").exists()


def _ranks(report):
    for pair in (d.pair for d in report.differences):
        yield tuple(record and record.site.rank for record in (pair.golden, pair.mine))


def test_each_rank_is_compared_with_the_same_rank_and_one_alone_with_all(tmp_path):
    for name, bug in (("golden", 0.0), ("mine", 1.0)):
        for rank in (0, 1):
            folder = tmp_path / name / f"worldsize2_global_rank{rank}/graph_1/0"
            folder.mkdir(parents=True)
            x = np.arange(6.0, dtype=np.float32).reshape(2, 3) + 10 * rank
            for node, value in (("add", x), ("mul", x * 2 + bug * rank)):
                np.save(folder / f"{node}-aten.{node}.Tensor.OUTPUT.0.20250101.npy", value)
    report = ld.compare(tmp_path / "golden", tmp_path / "mine", progress=False)
    assert set(_ranks(report)) == {(0, 0), (1, 1)}
    assert {d.site.rank for d in report.differences if d.verdict == "diverged"} == {1}

    shutil.rmtree(tmp_path / "golden/worldsize2_global_rank1")
    report = ld.compare(tmp_path / "golden", tmp_path / "mine", progress=False)
    assert {(0, 0), (0, 1)} <= set(_ranks(report))


@given(st.sampled_from(sorted(_COMMANDS)), st.lists(st.text(max_size=8), max_size=5))
def test_any_words_are_translated_or_refused(name, words):
    with contextlib.suppress(ld.errors.OptionError):
        found = translated(["llm", name, *words])
        assert found.words[0] == _COMMANDS[name].ours
