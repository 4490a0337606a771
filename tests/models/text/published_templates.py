"""Fetch the chat templates of published models: `python -m tests.models.text.published_templates FOLDER`.

llama.cpp and vLLM collect them, and PyPI has the sources of both.
"""

import sys
from pathlib import Path
from typing import Final

from tests.published_sources import files_of

_FOLDERS: Final = {"llama-cpp-python": "models/templates", "vllm": "examples"}
"""The end of the path of the templates' folder, by package."""


def fetch(folder: Path) -> None:
    """Write the templates into a folder, unless it has some.

    Raises:
        ValueError: an archive is not the one that is expected.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.jinja")):
        return
    for package, place in _FOLDERS.items():
        for path, content in files_of(package, Path(), ".jinja"):
            if path.parent.as_posix().endswith(place):
                (folder / path.name).write_bytes(content)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
