"""A real Jupyter server on loopback, for JupyterLab and Notebook 7, and its kernels."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import BlockingKernelClient
from playwright.sync_api import Locator, Page, expect

REPOSITORY = Path(__file__).parent.parent
# seconds: every wait ends with the state that it waits for, however busy the machine is; only what
# hangs takes as long
PATIENCE = 600
QUIET = {
    "@jupyterlab/apputils-extension:notification": {
        "checkForUpdates": False,
        "fetchNews": "false",
        "doNotDisturbMode": True,
    }
}
# JupyterLab silently drops a cell that is run before its kernel is connected
CONNECTED = """() => {
  const session = window.jupyterapp?.shell?.currentWidget?.sessionContext;
  const kernel = session?.session?.kernel;
  return session?.isReady && kernel?.connectionStatus === 'connected' && kernel?.status === 'idle';
}"""

CHANGE_THEME = "name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})"
# JupyterLab names the new theme on the page before the browser has its style sheet
PAINTED = """light => {
  const probe = document.body.appendChild(document.createElement('i'));
  probe.style.color = 'var(--jp-layout-color0)';
  const red = Number(getComputedStyle(probe).color.match(/\\d+/)[0]);
  probe.remove();
  return (red > 127) === light;
}"""


@dataclass(frozen=True)
class Lab:
    """The server and the folder that it serves."""

    url: str
    token: str
    root: Path
    runtime: Path

    def write_notebook(self, name: str, *cells: str) -> str:
        """Write a notebook of code cells; return its name."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells]
        )
        notebook.metadata.kernelspec = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(notebook, self.root / name)
        return name

    def copy_notebook(self, path: Path, python: Path) -> str:
        """Copy a notebook, to be run by a kernel of another Python; return its name."""
        spec = {
            "argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": path.stem,
            "language": "python",
        }
        folder = self.root.parent / "data" / "kernels" / path.stem
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
        notebook = nbformat.read(path, as_version=4)
        notebook.metadata.kernelspec = {
            "name": path.stem, "display_name": path.stem, "language": "python"
        }  # fmt: skip
        nbformat.write(notebook, self.root / path.name)
        return path.name

    def open(self, page: Page, name: str, app: str = "lab") -> None:
        """Open a notebook in JupyterLab (``lab``) or Notebook 7 and wait for its kernel."""
        place = f"lab/workspaces/w{secrets.token_hex(3)}/tree" if app == "lab" else "notebooks"
        page.goto(f"{self.url}/{place}/{name}?token={self.token}")
        page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=1000 * PATIENCE)
        page.wait_for_function(CONNECTED, timeout=1000 * PATIENCE)

    def run_cell(self, page: Page, index: int = 0) -> None:
        """Run a cell as a user does."""
        page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")

    def finished(self, page: Page, index: int) -> Locator:
        """Wait until the kernel has run a cell; return its output."""
        cell = page.locator(".jp-Notebook .jp-CodeCell").nth(index)
        prompt = cell.locator(".jp-InputArea-prompt")
        expect(prompt).to_have_text(re.compile(r"\[\d+\]"), timeout=1000 * PATIENCE)
        return cell.locator(".jp-OutputArea").first

    def kernel_eval(self, name: str, expression: str) -> str:
        """Return the repr of an expression in the notebook's kernel, past the page."""
        session = next(one for one in self._api("sessions") if one["path"] == name)
        client = BlockingKernelClient(
            connection_file=str(self.runtime / f"kernel-{session['kernel']['id']}.json")
        )
        client.load_connection_file()
        client.start_channels()
        try:
            reply = client.execute(
                "",
                user_expressions={"value": expression},
                store_history=False,
                reply=True,
                timeout=PATIENCE,
            )
            value = reply["content"]["user_expressions"]["value"]
            assert value["status"] == "ok", value
            return str(value["data"]["text/plain"])
        finally:
            client.stop_channels()

    def kernel_comes_to(self, name: str, expression: str, value: str) -> None:
        """Wait until the kernel has what the page did; the page shows it first."""
        deadline = time.monotonic() + PATIENCE
        while (now := self.kernel_eval(name, expression)) != value:
            assert time.monotonic() < deadline, f"{expression} is {now}, not {value}"
            time.sleep(0.1)

    def shut_down(self, kind: str) -> None:
        """Shut down the sessions of that type and their kernels."""
        for session in self._api("sessions"):
            if session["type"] == kind:
                self._api(f"sessions/{session['id']}", "DELETE")

    def _api(self, path: str, method: str = "GET") -> Any:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}/api/{path}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return json.loads(reply.read() or b"null")


def show_theme(page: Page, theme: str) -> None:
    """Show the page in the ``light`` or the ``dark`` theme; wait until it is painted."""
    page.evaluate(CHANGE_THEME, f"JupyterLab {theme.title()}")
    page.wait_for_function(PAINTED, arg=theme == "light", timeout=1000 * PATIENCE)
    page.locator("#jupyterlab-splash").wait_for(state="detached")


@contextlib.contextmanager
def running_lab(base: Path) -> Iterator[Lab]:
    """Serve an empty folder below ``base``, with settings of its own, until the block ends."""
    for name in ("root", "config", "runtime", "settings", "data", "labextensions"):
        (base / name).mkdir()
    (base / "labextensions" / "llmdebug-nb").symlink_to(REPOSITORY / "labextension" / "lib")
    (base / "settings" / "overrides.json").write_text(json.dumps(QUIET), encoding="utf-8")
    lab = Lab(
        f"http://127.0.0.1:{free_port()}", secrets.token_hex(16), base / "root", base / "runtime"
    )
    with open(base / "server.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            command(lab, base), env=environment(lab, base), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            wait_until_up(lab, server, base / "server.log")
            yield lab
        finally:
            stop(server)


def command(lab: Lab, base: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={lab.url.rpartition(':')[2]}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={lab.root}",
        f"--LabServerApp.workspaces_dir={base / 'workspaces'}",
        f"--LabServerApp.app_settings_dir={base / 'settings'}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.news_url=",
        "--LabApp.expose_app_in_browser=True",
        "--JupyterNotebookApp.expose_app_in_browser=True",
    ]


def environment(lab: Lab, base: Path) -> dict[str, str]:
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    inherited = {name: value for name, value in os.environ.items() if name != "LLMDEBUG_RUNS"}
    return {
        **inherited,
        "JUPYTER_TOKEN": lab.token,
        "JUPYTER_CONFIG_DIR": str(base / "config"),
        "JUPYTER_RUNTIME_DIR": str(lab.runtime),
        "JUPYTER_DATA_DIR": str(base / "data"),
        "JUPYTER_PATH": str(
            base
        ),  # the extension as it was built here goes before one that is installed
        "IPYTHONDIR": str(base / "ipython"),
        "JUPYTER_PLATFORM_DIRS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def wait_until_up(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            urllib.request.urlopen(f"{lab.url}/api", timeout=2).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the Jupyter server did not start:\n{log.read_text(encoding='utf-8')}"
                ) from None
            time.sleep(0.2)


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
