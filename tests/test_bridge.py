"""A request from the page is checked, answered, and never lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fake_view import FakeView
from llmdebug_nb.core.errors import TensorLookupError
from llmdebug_nb.notebook import widgets
from llmdebug_nb.notebook.bridge import Bridge
from llmdebug_nb.show import bundle, wire_requests
from view_requests import rows_request, view_request

ROWS = {**rows_request(step=1, n=5), "re": 7}


def error(content: object, view: Any = None) -> str:
    answer, buffers = Bridge(view or FakeView()).answer(content)
    assert buffers == []
    assert set(answer) == {"re", "error"}
    return str(answer["error"])


def test_an_answer_carries_the_number_of_its_request() -> None:
    answer, buffers = Bridge(FakeView()).answer(ROWS)
    assert answer["re"] == 7
    assert len(answer["rows"]) == 5
    assert buffers == []


def test_a_view_answers_with_its_floats_in_one_buffer() -> None:
    answer, [buffer] = Bridge(FakeView()).answer({**view_request(60, size=256), "re": 1})
    assert buffer.nbytes == 4 * answer["h"] * answer["w"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("rows", "a message must be an object, not str"),
        ({"re": 1}, "unknown op None; known: overview, children,"),
        ({"op": "__init__", "re": 1}, "unknown op '__init__'"),
        ({"op": ["rows"]}, "unknown op of type list"),
        ({**ROWS, "start": "0"}, "rows: Expected `int`, got `str` - at `$.start`"),
        ({**ROWS, "start": True}, "rows: Expected `int`, got `bool` - at `$.start`"),
        ({**ROWS, "mismatch": 0}, "rows: Expected `bool`, got `int` - at `$.mismatch`"),
        ({"op": "detail", "re": 1}, "detail: Object missing required field `row`"),
        ({"op": "detail", "re": 1, "row": 1, "column": 2}, "detail: unknown key 'column'"),
        (
            {"op": "histogram", "re": 1, "row": 1, "which": "theirs", "bins": 3},
            "histogram: Invalid enum value 'theirs' - at `$.which`",
        ),
        (
            {"op": "view", "re": 1, "row": 1, "which": "golden", "axes": [0, "1"]},
            "view: Expected `int`, got `str` - at `$.axes[1]`",
        ),
    ],
)
def test_a_request_that_wire_does_not_describe_gets_one_clear_line(
    content: object, expected: str
) -> None:
    assert expected in error(content)


class Failing(FakeView):
    def __init__(self, problem: Any) -> None:
        super().__init__()
        self.problem = problem

    def overview(self, request: wire_requests.OverviewRequest) -> Any:
        if isinstance(self.problem, Exception):
            raise self.problem
        return {**super().overview(request), **self.problem}


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (TensorLookupError("no row 9;\n there are 3"), r"no row 9;\n there are 3"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        ({"rows": float("nan")}, "ValidationError: Expected `int`, got `float` - at `$.rows`"),
        ({"rows": {1, 2}}, "ValidationError: Expected `int`, got `set` - at `$.rows`"),
        ({"mine": None}, "ValidationError: Expected `str`, got `null` - at `$.mine`"),
    ],
)
def test_what_goes_wrong_in_the_view_is_told(problem: object, expected: str) -> None:
    assert error({"op": "overview", "re": 3}, Failing(problem)).startswith(expected)


def test_requests_take_turns() -> None:
    inside, most = [0], [0]

    class Slow(FakeView):
        def detail(self, request: wire_requests.DetailRequest) -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            threading.Event().wait(0.02)
            inside[0] -= 1
            return {}

    bridge = Bridge(Slow())
    threads = [
        threading.Thread(target=bridge.answer, args=({"op": "detail", "re": n, "row": n},))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_a_bundle_that_was_not_built_is_named_with_what_to_do(tmp_path: Any) -> None:
    with pytest.raises(
        bundle.FrontEndMissingError, match=r"widget\.js is missing.*npm ci && npm run build"
    ):
        bundle.bundle(tmp_path / "widget.js")


def test_the_text_form_is_what_a_terminal_shows() -> None:
    explorer = widgets.Explorer(FakeView())
    assert repr(explorer) == "run of 288 records in 4 steps"
    assert explorer._repr_mimebundle_()[0]["text/plain"] == repr(explorer)


def test_a_run_opens_behind_its_warm_ups_and_a_report_at_its_first_mismatch() -> None:
    run, report = widgets.Explorer(FakeView()), widgets.Explorer(FakeView(report=True))
    assert (run.position, run.selected) == (1, -1)
    assert (report.position, report.selected) == (2, report.snapshot["first_bad"])


def test_a_position_that_does_not_exist_is_refused() -> None:
    explorer = widgets.Explorer(FakeView())
    with pytest.raises(Exception, match="position must be 0 to 3, not 4"):
        explorer.position = 4
    assert explorer.position == 1
