"""Fixtures that several test files share."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # processes share the cores; before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # where a program asks for more

import atexit
import contextlib
import re
import shutil
import signal
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from playwright.sync_api import Page

from browser import Mount, launch_args
from browser import mount as mount_in
from lab_server import Lab, running_lab
from llmdebug_nb.app import recording, runs
from llmdebug_nb.core.errors import LLMDebugError

# --- the same everywhere ------------------------------------------------------------------------

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a program that a shell put behind
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "TORCH_EXTENSIONS_DIR" not in os.environ:  # an observer that somebody has built tells others
    _none = os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, _none, ignore_errors=True)

# The same examples in each run, however slow the machine is; `--hypothesis-profile=explore` tries
# others.
_SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **_SLOW)
settings.register_profile("explore", max_examples=1000, **_SLOW)
settings.load_profile("same")

# --- order and groups ---------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what drives a browser, and start with the longest files.

    Several processes, each of which takes a file at a time, then end at about the same time.
    """
    for item in items:
        if "page" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
    items.sort(key=_start)


def _start(item: pytest.Item) -> int:
    if "lab" in getattr(item, "fixturenames", ()):
        return 0
    return 1 if item.get_closest_marker("slow") else 2


# --- what a machine may lack ---------------------------------------------------------------------


@pytest.fixture(scope="session")
def inductor() -> None:
    """Skip, with the reason, where Inductor can't build a kernel for this CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second
    from torch._inductor.exc import InvalidCxxCompiler

    if " " in torch.__file__:
        pytest.skip("Inductor can't link against a torch whose path has a space")
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        pytest.skip(f"Inductor finds no C++ compiler: {error}")


# --- runs ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _runs_of_their_own(tmp_path_factory, monkeypatch):
    """Give each test its own runs folder, no known runs, and stop what it left recording."""
    monkeypatch.setenv("LLMDEBUG_RUNS", str(tmp_path_factory.mktemp("runs")))
    runs.recorded.clear()
    started = []
    start = recording.Recording.start

    def noted(self):
        started.append(weakref.ref(self))  # one that runs is held by its hooks
        return start(self)

    monkeypatch.setattr(recording.Recording, "start", noted)
    yield
    for one in filter(None, [seen() for seen in started]):
        if one.running:
            with contextlib.suppress(LLMDebugError):
                one.stop()


# --- notebooks ----------------------------------------------------------------------------------


@pytest.fixture
def ipython() -> Iterator[Any]:
    """IPython as a kernel runs it, with our magics."""
    from IPython.core.interactiveshell import InteractiveShell

    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "llmdebug_nb")
    yield shell
    shell.run_line_magic("unload_ext", "llmdebug_nb")
    InteractiveShell.clear_instance()


# --- browser: bare page and Jupyter -------------------------------------------------------------

SCREENSHOTS = Path(__file__).parent.parent / "out"


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any]) -> dict[str, Any]:
    return launch_args(browser_type_launch_args)


@pytest.fixture(scope="session")
def browser_context_args(browser_context_args: dict[str, Any]) -> dict[str, Any]:
    return {**browser_context_args, "viewport": {"width": 1280, "height": 900}}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    page = getattr(item, "funcargs", {}).get("page")
    if report.when == "call" and report.failed and isinstance(page, Page):
        SCREENSHOTS.mkdir(exist_ok=True)
        page.screenshot(
            path=SCREENSHOTS / (re.sub(r"\W+", "_", item.name) + ".png"), full_page=True
        )
    return report


@pytest.fixture
def mount(page: Page) -> Iterator[Mount]:
    """Show an explorer in the bare page; at the end, no script may have failed.

    The drawer of a comparison, with tree and records, is opened unless ``drawer`` is false.
    """
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))

    def show(explorer: Any, drawer: bool = True) -> Page:
        mount_in(page, explorer)
        if drawer and explorer.snapshot["kind"] == "report":
            page.get_by_role("button", name="Records and model tree").click()
        return page

    yield show
    assert errors == []


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as server:
        yield server


# --- end of browser ------------------------------------------------------------------------------
