"""The JupyterLab extension: how it is packed, and what it does in a real JupyterLab."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Locator, Page, expect

import llmdebug_nb as ld
from browser import violations
from lab_server import Lab, running_lab, show_theme
from recordings import record_linear

REPOSITORY = Path(__file__).parent.parent
EXTENSION = REPOSITORY / "labextension"
SCREENSHOTS = REPOSITORY / "out"
HOSTILE = "<img src=x onerror=document.title='owned'>"

# --- packing ------------------------------------------------------------------------------------


def test_the_extension_has_the_version_of_the_package() -> None:
    for file in ("package.json", "package-lock.json", "lib/package.json"):
        assert (
            json.loads((EXTENSION / file).read_text(encoding="utf-8"))["version"] == ld.__version__
        )
    assert f'version = "{ld.__version__}"' in (REPOSITORY / "pyproject.toml").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("kind", ["standard", "editable"])
def test_wheel_and_sdist_carry_the_extension_and_are_built_without_node(
    tmp_path: Path, kind: str
) -> None:
    checkout, built = tmp_path / "checkout", tmp_path / "built"
    skip = shutil.ignore_patterns("node_modules", "__pycache__")
    for folder in ("llmdebug_nb", "labextension"):
        shutil.copytree(REPOSITORY / folder, checkout / folder, ignore=skip)
    for file in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(REPOSITORY / file, checkout)
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-d",
        str(built),
        "-t",
        f"wheel:{kind}",
        "-t",
        "sdist",
    ]
    environment = {**os.environ, "PATH": "", "CC": "false"}
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        home = f"llmdebug_nb-{ld.__version__}.data/data/share/jupyter/labextensions/llmdebug-nb/"
        shipped = {
            name.removeprefix(home): name for name in archive.namelist() if name.startswith(home)
        }
        assert {"install.json", "package.json", "schemas/llmdebug-nb/plugin.json"} <= shipped.keys()
        load = json.loads(archive.read(shipped["package.json"]))["jupyterlab"]["_build"]["load"]
        assert load in shipped
        assert not [name for name in archive.namelist() if name.startswith("labextension/")]
    with tarfile.open(sdist) as archive:
        assert any(name.endswith(f"/labextension/lib/{load}") for name in archive.getnames())
        assert any(
            name.endswith("/labextension/src/plugin/index.ts") for name in archive.getnames()
        )


# --- in JupyterLab ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab of their own, with runs in its workspace."""
    with running_lab(tmp_path_factory.mktemp("labextension")) as server:
        record_linear(server.root, "golden")
        record_linear(server.root, "mine", scale=2.0)
        record_linear(server.root / "sub", "other")
        yield server


def open_lab(lab: Lab, page: Page, place: str = "") -> None:
    page.goto(f"{lab.url}/lab/workspaces/w{secrets.token_hex(3)}{place}?token={lab.token}")
    restored(page)


def restored(page: Page) -> None:
    page.wait_for_function("() => window.jupyterapp?.restored.then(() => true)", timeout=60_000)
    page.locator("#jupyterlab-splash").wait_for(state="detached", timeout=60_000)


def layout_saved(page: Page, holding: str) -> None:
    """Wait until the server has the layout, which JupyterLab saves about a second late."""
    page.wait_for_function(
        """([id, holding]) => window.jupyterapp.serviceManager.workspaces.fetch(id).then(
             saved => JSON.stringify(saved.data).includes(holding), () => false)""",
        arg=[re.search(r"/workspaces/([^/?]+)", page.url)[1], holding],
        timeout=60_000,
    )


def execute(page: Page, command: str) -> None:
    """Run a command, without waiting for the dialog that it may open."""
    page.evaluate("id => { void window.jupyterapp.commands.execute(id); }", command)


def run_row(page: Page, name: str) -> Locator:
    return page.get_by_role("option", name=re.compile(rf"^{re.escape(name)}\b"))


def show_runs(page: Page) -> Locator:
    """Show the sidebar and return its list, once it has rows: keys before that choose nothing."""
    execute(page, "llmdebug:show-runs")
    listed = page.get_by_role("listbox", name="Runs and reports")
    expect(listed.get_by_role("option").first).to_be_visible(timeout=60_000)
    return listed


def action(page: Page, name: str) -> Locator:
    return page.get_by_role("group", name="Actions on the selection").get_by_role(
        "button", name=name
    )


def tab(page: Page) -> Locator:
    return page.locator(".jp-llmdebug-tab:visible")


def test_the_sidebar_lists_the_runs_of_the_workspace(lab: Lab, page: Page) -> None:
    open_lab(lab, page)
    options = show_runs(page).get_by_role("option")
    expect(options.filter(has_text="golden")).to_contain_text("1 step · 6 tensors")
    expect(options.filter(has_text="other")).to_have_count(0)
    lab.write_notebook("sub/beside.ipynb", "1")
    page.evaluate(
        "() => { void window.jupyterapp.commands.execute('docmanager:open', {path: 'sub/"
        "beside.ipynb'}); }"
    )
    expect(options.filter(has_text="other")).to_have_count(1, timeout=30_000)
    expect(page.get_by_role("group", name="sub/llmdebug_runs")).to_be_visible()
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "labextension_runs.png")


def test_a_run_opens_in_a_tab_by_keyboard_and_comes_back_after_a_reload(
    lab: Lab, page: Page
) -> None:
    open_lab(lab, page)
    listed = show_runs(page)
    expect(run_row(page, "golden")).to_be_visible()
    listed.press("End")
    expect(run_row(page, "golden")).to_have_attribute("aria-selected", "true")
    listed.press("Enter")
    expect(tab(page).locator(".llmdebug-total")).to_have_text("6 records", timeout=60_000)
    tab(page).get_by_role("treeitem", name="0 Linear").click()
    expect(tab(page).locator(".llmdebug-total")).to_have_text("2 records")
    layout_saved(page, "llmdebug_runs/golden")
    page.reload()
    restored(page)
    expect(tab(page).locator(".llmdebug-total")).to_have_text("6 records", timeout=60_000)


def test_two_selected_runs_are_compared_and_the_first_one_is_golden(lab: Lab, page: Page) -> None:
    open_lab(lab, page)
    show_runs(page)
    expect(action(page, "Compare")).to_be_disabled()
    run_row(page, "mine").click()
    run_row(page, "golden").click(modifiers=["Control"])
    expect(page.get_by_role("status").filter(has_text="Golden:")).to_have_text(
        "Golden: mine. Mine: golden."
    )
    expect(action(page, "Open")).to_be_disabled()
    action(page, "Compare").click()
    expect(tab(page).get_by_text("mine against golden")).to_be_visible(timeout=60_000)
    expect(tab(page).get_by_role("heading", level=2)).to_contain_text("diverged")


def test_a_report_is_listed_and_opens(lab: Lab, page: Page) -> None:
    golden, mine = (lab.root / "llmdebug_runs" / name for name in ("golden", "mine"))
    file = ld.compare(golden, mine).to_html(lab.root / "report.html")
    try:
        open_lab(lab, page)
        show_runs(page)
        report = page.get_by_role("group", name="Reports in /").get_by_role("option")
        report.click()
        run_row(page, "golden").click(modifiers=["Control"])
        expect(action(page, "Compare")).to_be_disabled()
        report.dblclick()
        shown = tab(page).frame_locator("iframe")
        expect(shown.get_by_role("heading", name="golden against mine")).to_be_visible(
            timeout=60_000
        )
    finally:
        file.unlink()


def test_a_saved_explorer_opens_from_the_file_browser_and_is_walked(lab: Lab, page: Page) -> None:
    golden, mine = (lab.root / "llmdebug_runs" / name for name in ("golden", "mine"))
    file = ld.export(ld.compare(golden, mine), lab.root / "saved.html")
    try:
        open_lab(lab, page)
        page.locator(".jp-DirListing-item", has_text="saved.html").click(
            button="right", timeout=60_000
        )
        page.get_by_role("menuitem", name="Open with llmdebug").click()
        shown = tab(page).frame_locator("iframe")
        expect(shown.get_by_text("golden against mine", exact=True)).to_be_visible(timeout=60_000)
        shown.get_by_role("button", name="Next mismatch").click()
        expect(shown.locator(".llmdebug-place h3")).to_be_visible()
    finally:
        file.unlink()


def test_deleting_asks_first(lab: Lab, page: Page) -> None:
    path = record_linear(lab.root, "surplus")
    open_lab(lab, page)
    show_runs(page)
    run_row(page, "surplus").click()
    action(page, "Delete").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("surplus")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    assert path.exists()
    page.get_by_role("listbox", name="Runs and reports").press("Delete")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(run_row(page, "surplus")).to_have_count(0, timeout=60_000)
    assert not path.exists()
    assert (lab.root / "llmdebug_runs" / "golden").exists()


def test_a_run_is_revealed_in_the_file_browser(lab: Lab, page: Page) -> None:
    open_lab(lab, page)
    show_runs(page)
    run_row(page, "golden").click()
    action(page, "Reveal").click()
    selected = page.locator(".jp-DirListing-item.jp-mod-selected")
    expect(selected).to_be_visible()
    expect(selected).to_contain_text("golden")


def test_a_dump_folder_opens_from_the_file_browser_without_code(lab: Lab, page: Page) -> None:
    open_lab(lab, page, "/tree/llmdebug_runs")
    item = page.locator(".jp-DirListing-item", has_text="golden").first
    item.click(button="right", timeout=60_000)
    page.get_by_role("menuitem", name="Open with llmdebug").click()
    expect(tab(page).locator(".llmdebug-total")).to_have_text("6 records", timeout=60_000)


def test_open_with_on_a_folder_of_runs_lists_them_and_selects_the_newest(
    lab: Lab, page: Page
) -> None:
    folder = lab.root / "other_runs"
    record_linear(folder, "first")
    record_linear(folder, "second")
    (folder / "llmdebug_runs").rename(folder / "my_dumps")
    open_lab(lab, page, "/tree/other_runs")
    item = page.locator(".jp-DirListing-item", has_text="my_dumps")
    item.click(button="right", timeout=60_000)
    page.get_by_role("menuitem", name="Open with llmdebug").click()
    listed = page.get_by_role("listbox", name="Runs and reports")
    expect(listed.get_by_role("group", name="other_runs/my_dumps")).to_be_visible(timeout=60_000)
    expect(listed.locator("[aria-selected=true]")).to_contain_text("second")
    action(page, "Open").click()
    expect(tab(page).locator(".llmdebug-total")).to_have_text("6 records", timeout=60_000)


def test_runs_are_searched_swapped_and_keep_the_verdict_of_their_comparison(
    lab: Lab, page: Page
) -> None:
    open_lab(lab, page)
    listed = show_runs(page)
    expect(run_row(page, "golden")).to_contain_text("Sequential")
    search = page.get_by_role("searchbox", name="Search runs and reports")
    search.fill("min sequential")
    expect(listed.get_by_role("option")).to_have_count(1)
    search.fill("nothing like that")
    expect(page.get_by_text("Nothing here has “nothing like that”")).to_be_visible()
    search.fill("")
    run_row(page, "mine").click()
    run_row(page, "golden").click(modifiers=["Control"])
    status = page.locator(".jp-llmdebug-line")
    expect(status).to_have_text("Golden: mine. Mine: golden.")
    action(page, "Swap").click()
    expect(status).to_have_text("Golden: golden. Mine: mine.")
    action(page, "Compare").click()
    expect(tab(page).locator(".llmdebug-verdict").first).to_be_visible(timeout=60_000)
    expect(run_row(page, "mine")).to_contain_text("against golden: diverged", timeout=60_000)


def test_a_folder_that_is_no_dump_says_so(lab: Lab, page: Page) -> None:
    (lab.root / "nothing").mkdir(exist_ok=True)
    open_lab(lab, page)
    page.locator(".jp-DirListing-item", has_text="nothing").click(button="right", timeout=60_000)
    page.get_by_role("menuitem", name="Open with llmdebug").click()
    expect(tab(page).get_by_role("alert")).to_contain_text("nothing", timeout=60_000)
    expect(tab(page).get_by_role("button", name="Try again")).to_be_visible()


def test_hostile_names_are_text(lab: Lab, page: Page) -> None:
    path = record_linear(lab.root, "hostile")
    named = path.rename(path.with_name(HOSTILE))
    try:
        open_lab(lab, page)
        show_runs(page)
        hostile = page.get_by_role("option").filter(has_text=HOSTILE)
        expect(hostile).to_be_visible(timeout=30_000)
        hostile.dblclick()
        expect(tab(page).locator(".llmdebug-total")).to_have_text("6 records", timeout=60_000)
        hostile.click()
        action(page, "Delete").click()
        expect(page.get_by_role("dialog")).to_contain_text(HOSTILE)
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        assert page.locator("img[src=x]").count() == 0
        assert page.title() != "owned"
    finally:
        shutil.rmtree(named)


def test_palette_and_launcher_lead_to_the_sidebar(lab: Lab, page: Page) -> None:
    open_lab(lab, page)
    page.locator(".jp-LauncherCard", has_text="Recorded Runs").click(timeout=60_000)
    expect(page.get_by_role("listbox", name="Runs and reports")).to_be_visible(timeout=60_000)
    run_row(page, "golden").click()
    page.keyboard.press("Control+Shift+C")
    page.get_by_role("textbox", name="SEARCH").fill("llmdebug")
    for name in (
        "Recorded Runs",
        "Delete Selected Runs and Reports",
        "Reveal Selected Run or Report",
    ):
        expect(page.locator(".lm-CommandPalette-item", has_text=name)).to_be_visible()
    expect(page.locator(".lm-CommandPalette-item", has_text="Compare Selected Runs")).to_be_hidden()
    page.locator(".lm-CommandPalette-item", has_text="Open Selected Run or Report").click()
    expect(tab(page).locator(".llmdebug-total")).to_have_text("6 records", timeout=60_000)


def notebook_cells(page: Page) -> list[str]:
    return page.evaluate(
        "() => [...window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells]"
        ".map(one => one.getSource())"
    )


def settle(page: Page, **settings: str) -> None:
    """Save settings of the extension."""
    save = "text => window.jupyterapp.serviceManager.settings.save('llmdebug-nb:plugin', text)"
    page.evaluate(save, json.dumps(settings))


MODEL = "import torch\nmodel = torch.nn.Linear(4, 4)"


def test_the_notebooks_button_records_the_cell_and_takes_it_back(lab: Lab, page: Page) -> None:
    notebook = lab.write_notebook("button.ipynb", MODEL, "model(torch.ones(2, 4)).shape")
    lab.open(page, notebook)
    lab.run_cell(page)
    button = page.locator(".jp-NotebookPanel-toolbar").get_by_role(
        "button", name="Record the model"
    )
    expect(button).to_have_attribute("aria-pressed", "false")
    button.click()  # the second cell is the active one
    expect(button).to_have_attribute("aria-pressed", "true")
    assert notebook_cells(page) == [
        MODEL,
        "%load_ext llmdebug_nb",
        "%%llmdump\nmodel(torch.ones(2, 4)).shape",
    ]
    lab.run_cell(page, 2)
    expect(page.locator(".jp-Notebook")).to_contain_text("run: 2 tensors of 1 step", timeout=60_000)
    expect(page.locator(".jp-Notebook")).to_contain_text("torch.Size([2, 4])")
    page.locator(".jp-CodeCell").nth(0).locator(".cm-content").click()
    expect(button).to_have_attribute("aria-pressed", "false")
    page.locator(".jp-CodeCell").nth(2).locator(".cm-content").click()
    expect(button).to_have_attribute("aria-pressed", "true")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    assert notebook_cells(page)[2] == "model(torch.ones(2, 4)).shape"
    show_runs(page)
    expect(run_row(page, "run")).to_contain_text("1 step · 2 tensors", timeout=30_000)


def test_the_settings_say_what_the_button_writes_and_where_runs_are(lab: Lab, page: Page) -> None:
    notebook = lab.write_notebook("options.ipynb", "%load_ext llmdebug_nb")
    (lab.root / "elsewhere").mkdir()
    shutil.copytree(lab.root / "llmdebug_runs" / "golden", lab.root / "elsewhere" / "moved")
    lab.open(page, notebook)
    try:
        settle(page, dumpOptions="--stats-only", runsFolder="elsewhere")
        page.reload()
        restored(page)
        page.get_by_role("button", name="Record the model").click(timeout=60_000)
        assert notebook_cells(page) == ["%%llmdump --stats-only\n%load_ext llmdebug_nb"]
        show_runs(page)
        expect(run_row(page, "moved")).to_be_visible()
        expect(run_row(page, "golden")).to_have_count(0)
    finally:
        settle(page)


def test_the_pointer_over_a_magic_shows_what_its_options_mean(lab: Lab, page: Page) -> None:
    notebook = lab.write_notebook(
        "hover.ipynb", "%load_ext llmdebug_nb", "%%llmdump model --tokens 0-3\nmodel(1)"
    )
    lab.open(page, notebook)
    lab.run_cell(page)
    expect(page.locator(".jp-CodeCell").first.locator(".jp-InputPrompt")).to_have_text(
        "[1]:", timeout=60_000
    )
    line = page.locator(".cm-line", has_text="%%llmdump")
    box = line.bounding_box()
    assert box is not None
    per_letter = page.evaluate(
        "line => { const r = document.createRange(); r.selectNodeContents(line); return "
        "r.getBoundingClientRect().width; }",
        line.element_handle(),
    ) / len("%%llmdump model --tokens 0-3")
    for letter, text in (
        (19, "--tokens TOKENS\ngenerated tokens"),
        (5, "Record the model that runs in this cell"),
    ):
        page.mouse.move(0, 0)
        page.mouse.move(box["x"] + per_letter * letter, box["y"] + box["height"] / 2)
        page.mouse.move(box["x"] + per_letter * (letter + 0.5), box["y"] + box["height"] / 2)
        expect(page.get_by_role("tooltip")).to_contain_text(text)


def test_the_sidebar_follows_a_recording(lab: Lab, page: Page) -> None:
    open_lab(lab, page)
    show_runs(page)
    model = torch.nn.Linear(256, 256)
    with ld.dump(model, name="live", tokens="all", path=str(lab.root / "llmdebug_runs")) as run:
        live = run_row(page, "live")
        expect(live).to_contain_text("recording", timeout=30_000)
        for steps in ("1 step", "2 steps"):
            model(torch.ones(256, 256))
            expect(live).to_contain_text(f"{steps} · ", timeout=30_000)
        expect(live).to_contain_text(re.compile(r"recording · [\d.,]+ \w*B/s"))
    expect(live).not_to_contain_text("recording", timeout=30_000)
    assert run.path is not None
    shutil.rmtree(run.path)
    expect(live).to_have_count(0, timeout=30_000)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_sidebar_has_no_accessibility_violation(lab: Lab, page: Page, theme: str) -> None:
    open_lab(lab, page, "/tree/sub")
    show_theme(page, theme)
    show_runs(page)
    run_row(page, "golden").click()
    assert violations(page, "#jp-llmdebug-panel") == []
    page.screenshot(path=SCREENSHOTS / f"labextension_{theme}.png")
    show_theme(page, "light")


def test_the_list_is_used_by_keyboard_alone(lab: Lab, page: Page) -> None:
    open_lab(lab, page)
    listed = show_runs(page)
    selected = listed.locator("[aria-selected=true]")
    expect(listed.get_by_role("option").nth(1)).to_be_visible()
    listed.press("Home")
    expect(selected).to_have_count(1)
    first = selected.get_attribute("id")
    assert listed.get_attribute("aria-activedescendant") == first
    listed.press("Shift+ArrowDown")
    expect(selected).to_have_count(2)
    listed.press("Space")
    expect(selected).to_have_count(1)
    listed.press("Control+a")
    expect(selected).to_have_count(listed.get_by_role("option").count())


def test_a_kernel_without_the_package_is_named(lab: Lab, page: Page, tmp_path: Path) -> None:
    (tmp_path / "llmdebug_nb").mkdir()
    (tmp_path / "llmdebug_nb" / "__init__.py").write_text(
        "raise ImportError('not here')", encoding="utf-8"
    )
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Bare",
        "language": "python",
        "env": {"PYTHONPATH": str(tmp_path)},
    }
    home = lab.runtime.parent / "kernels" / "bare"
    home.mkdir(parents=True)
    (home / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    try:
        open_lab(lab, page)
        show_runs(page)
        settle(page, kernel="bare")
        page.reload()
        restored(page)
        execute(page, "llmdebug:show-runs")
        alert = page.locator("#jp-llmdebug-panel").get_by_role("alert")
        expect(alert).to_contain_text(
            'The kernel "bare" has no llmdebug-nb (ImportError: not here)', timeout=60_000
        )
    finally:
        settle(page)
        shutil.rmtree(home)
    page.reload()
    restored(page)
    expect(show_runs(page).get_by_role("option").first).to_be_visible()


def test_the_sidebar_and_a_tab_recover_when_their_kernel_is_shut_down(lab: Lab, page: Page) -> None:
    open_lab(lab, page)
    show_runs(page)
    lab.shut_down("llmdebug")
    path = record_linear(lab.root, "later")
    again = page.locator("#jp-llmdebug-panel").get_by_role("button", name="Try again")
    expect(run_row(page, "later").or_(again)).to_be_visible(timeout=60_000)
    if again.is_visible():
        again.click()
    expect(run_row(page, "later")).to_be_visible(timeout=60_000)
    shutil.rmtree(path)


def test_a_notebook_in_notebook_7_has_the_sidebar_and_opens_runs_below(
    lab: Lab, page: Page
) -> None:
    notebook = lab.write_notebook("seven.ipynb", "1 + 1")
    lab.open(page, notebook, "notebook")
    expect(page.get_by_role("button", name="Record the model")).to_be_visible()
    show_runs(page)
    run_row(page, "golden").dblclick()
    opens_below(page)
    page.screenshot(path=SCREENSHOTS / "labextension_notebook.png")


def test_the_files_of_notebook_7_have_open_with(lab: Lab, page: Page) -> None:
    page.goto(f"{lab.url}/tree/llmdebug_runs?token={lab.token}")
    page.locator(".jp-DirListing-item", has_text="golden").first.click(
        button="right", timeout=60_000
    )
    page.get_by_role("menuitem", name="Open with llmdebug").click()
    opens_below(page)


def opens_below(page: Page) -> None:
    expect(tab(page).locator(".llmdebug-total")).to_have_text("6 records", timeout=60_000)
    box = tab(page).bounding_box()
    assert box is not None
    assert box["height"] > 300
