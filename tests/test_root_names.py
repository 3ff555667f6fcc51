"""The names at the root of the package, and the modules for users of other tools."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import llmdebug_nb as ld
from llmdebug_nb import msit, msprobe, torchair


@pytest.mark.parametrize("name", sorted(ld._MOVED))
def test_a_name_that_moved_still_works_until_0_2_and_says_where_it_is(name):
    with pytest.warns(DeprecationWarning, match=f"^llmdebug_nb.{name} is now ") as caught:
        value = getattr(ld, name)
    new_name, _, advice = str(caught[0].message).split(" is now ")[1].partition("; ")
    assert advice == "the old name goes in 0.2"
    package, *attributes = new_name.split(".")
    assert (package, attributes[-1]) == ("llmdebug_nb", name)
    assert value is functools.reduce(getattr, attributes, ld)
    assert caught[0].filename == __file__


def test_the_root_has_few_names_and_type_checkers_know_the_same_ones():
    assert len(ld.__all__) <= 33
    tree = ast.parse(Path(ld.__file__).read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If))
    imported = {
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module.startswith("llmdebug_nb.")
        for alias in node.names
    }
    assert imported == set(ld._HOMES)
    assert set(ld.__all__) == {"LLMDebugError", "errors", *ld._HOMES}
    assert not ld._HOMES.keys() & ld._MOVED.keys()


def test_every_name_at_the_root_is_there_and_dir_lists_it():
    for name in ld.__all__:
        assert getattr(ld, name) is not None
        assert name in dir(ld)


def test_importing_the_package_loads_neither_torch_nor_a_notebook_package():
    script = (
        "import sys, llmdebug_nb, llmdebug_nb.cli; llmdebug_nb.LLMDebugError; dir(llmdebug_nb)\n"
        "light = {'IPython', 'anywidget', 'ipywidgets', 'matplotlib'}\n"
        "heavy = {*light, 'torch', 'numpy', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "llmdebug_nb.dump\n"
        "light &= set(sys.modules)\n"
        "assert not light, light\n"
        "import torch\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent.parent)


def test_the_names_of_upstream_tools_are_each_in_one_module():
    saved = {"get_bin_data_from_dir", "read_bin_data", "convert_bin_data_to_pt", "read_dump_data",
             "convert_bin_data_to_npy", "save_torch_data", "save_npy_data"}  # fmt: skip
    assert set(msit.__all__) == saved | {
        "DumpConfig", "atb_json_to_onnx", "register_hook", "seed_all",
    }  # fmt: skip
    assert set(msprobe.__all__) == saved | {
        "PrecisionDebugger", "parse_torchair_dump_data", "seed_all",
    }  # fmt: skip
    assert set(torchair.__all__) == {
        "convert", "get_fx_dump_config", "get_ge_dump_config", "parse_torchair_dump_data",
        "read_dump_data", "convert_bin_data_to_npy",
    }  # fmt: skip
    for module in (msit, msprobe, torchair):
        assert all(callable(getattr(module, name)) for name in module.__all__)
