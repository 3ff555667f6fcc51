"""The two ends of the wire agree."""

from __future__ import annotations

import importlib.util
import json
import re
import typing
from pathlib import Path
from types import ModuleType

import pytest

from llmdebug_nb.comparison import differences
from llmdebug_nb.notebook import desk_wire
from llmdebug_nb.show import wire, wire_requests
from llmdebug_nb.show.row_columns import LIST_COLUMNS

SCRIPT = Path(__file__).parent.parent / "labextension" / "wire_types.py"


@pytest.fixture(scope="module")
def wire_types() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wire_types", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_typescript_is_what_the_script_writes(wire_types: ModuleType) -> None:
    assert wire_types.main(["--check"]) == 0


def test_check_fails_when_a_file_is_out_of_date(
    wire_types: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        wire_types, "TARGETS", dict.fromkeys([*wire_types.TARGETS][:1], tmp_path / "wire.ts")
    )
    assert wire_types.main(["--check"]) == 1
    assert wire_types.main([]) == 0
    assert wire_types.main(["--check"]) == 0
    (tmp_path / "wire.ts").write_text("// older\n", encoding="utf-8")
    assert wire_types.main(["--check"]) == 1


def test_types_are_written_as_typescript(wire_types: ModuleType) -> None:
    aliases = {wire.Num: "Num", wire.Verdict: "Verdict"}
    expected = {
        int: "number",
        list[int]: "number[]",
        wire.Num: "Num",
        wire.Verdict | None: "Verdict | null",
        int | None: "number | null",
        list[int | None]: "(number | null)[]",
        wire.Row | None: "Row | null",
    }
    assert {hint: wire_types.typescript(hint, aliases) for hint in expected} == expected


def test_the_columns_of_the_list_come_along(wire_types: ModuleType) -> None:
    text = next(iter(wire_types.TARGETS.values())).read_text(encoding="utf-8")
    (listed,) = re.findall(r"const LIST_COLUMNS: ListColumn\[\] = (\[.*?)\n\];", text, re.DOTALL)
    assert json.loads(listed.rstrip(",") + "]") == LIST_COLUMNS


def test_docstrings_and_ops_come_along(wire_types: ModuleType) -> None:
    text = next(iter(wire_types.TARGETS.values())).read_text(encoding="utf-8")
    assert " * One step of the token stepper." in text
    assert "  detail: { request: DetailRequest; answer: Detail };" in text


def test_every_op_names_itself() -> None:
    for op, (request, _) in [*wire_requests.ANSWERS.items(), *desk_wire.ANSWERS.items()]:
        assert typing.get_args(typing.get_type_hints(request)["op"]) == (op,)


def test_the_verdicts_of_the_wire_are_those_of_a_report() -> None:
    assert typing.get_args(wire.Verdict) == typing.get_args(differences.Verdict)
