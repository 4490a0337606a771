"""Build wheel and sdist, install each into a fresh environment, serve the demo model, ask one question.

Everything happens in a temporary folder outside the checkout, so that no module is imported from here.
Needs the `build` package (dependency group `dev`), and the package index or pip's cache.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
QUESTION: Final = "What does len do?"
ANSWER: Final = "Return the number of items in a container."
READY_SECONDS: Final = 120.0
STOP_SECONDS: Final = 60.0


def main() -> None:
    """Exit with an error as soon as one package does not build, install, serve, answer or stop."""
    with tempfile.TemporaryDirectory(prefix="dalsegno-packages-") as name:
        folder = Path(name)
        _run("build wheel and sdist", sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT)
        [wheel] = (folder / "dist").glob("*.whl")
        [sdist] = (folder / "dist").glob("*.tar.gz")
        for package in (wheel, sdist):
            kind = "wheel" if package is wheel else "sdist"
            python = _installed(package, folder / kind)
            _ask_once(python, folder / kind)
            print(f"{kind}: installed, served, answered, stopped", flush=True)


def _installed(package: Path, folder: Path) -> Path:
    """Install `package` with the extras of a deployment into a new environment; return its Python."""
    _run("create an environment", sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    # torch goes first and pinned: see constraints.txt.
    constraints = ("--constraint", ROOT / "constraints.txt")
    _run("install torch", *pip, *constraints, "torch")
    _run(f"install {package.name}", *pip, *constraints, f"{package}[all]")
    return python


def _ask_once(python: Path, folder: Path) -> None:
    """Serve the demo model with the installed command, compare one answer, and stop it with Ctrl-C."""
    command, ready = python.with_name("dalsegno"), folder / "ready.json"
    # Whoever runs this may point at a checkout, or at another deployment: the installed package alone counts.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DALSEGNO_"))}
    data_dir = ("--data-dir", folder / "data")
    with (folder / "terminal.txt").open("wb") as terminal:
        server = subprocess.Popen(
            [command, "serve", "demo", "--port", "0", *data_dir, "--ready-file", ready],
            cwd=folder,
            env=env,
            stdout=terminal,
            stderr=terminal,
        )
    try:
        _wait_for(ready, server, folder / "terminal.txt")
        url: str = json.loads(ready.read_text())["url"]
        answer = subprocess.run(
            [command, "ask", "--url", url, QUESTION],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        if answer != ANSWER:
            sys.exit(f"{command} ask: expected {ANSWER!r}, found {answer!r}")
    finally:
        server.send_signal(signal.SIGINT)
        status = server.wait(STOP_SECONDS)
    if status != 0:
        sys.exit(f"{command} serve: expected exit status 0 after Ctrl-C, found {status}")


def _wait_for(ready: Path, server: subprocess.Popen[bytes], terminal: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not ready.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the installed server did not become ready:\n{terminal.read_text(errors='replace')}")
        time.sleep(0.1)


def _run(step: str, *command: str | Path) -> None:
    print(f"{step} ...", flush=True)
    if status := subprocess.run(command, check=False).returncode:
        sys.exit(f"{step}: {command[0]} ended with status {status}")


if __name__ == "__main__":
    main()
