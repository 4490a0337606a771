"""Source packages of other servers, from PyPI: their chat templates and their tests are read by ours."""

import hashlib
import json
import tarfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Final

_ARCHIVES: Final = {
    "llama-cpp-python": (
        "llama_cpp_python-0.3.36.tar.gz",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    ),
    "vllm": (
        "vllm-0.33.0.tar.gz",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    ),
}
"""The archive of each package, and its SHA-256."""


def files_of(package: str, under: Path, suffix: str) -> Iterator[tuple[Path, bytes]]:
    """The files of a package below a folder, by their path in the package.

    Raises:
        ValueError: the archive is not the one that is expected.
    """
    name, expected = _ARCHIVES[package]
    data = _fetched(f"https://pypi.org/simple/{package}/", name)
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise ValueError(f"{name}: expected the SHA-256 {expected}, found {found}")
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        for member in archive:
            path = Path(*Path(member.name).parts[1:])
            content = archive.extractfile(member) if path.is_relative_to(under) else None
            if content is not None and path.suffix == suffix:
                yield path, content.read()


def _fetched(page: str, name: str) -> bytes:
    asked = urllib.request.Request(page, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        files = json.load(answer)["files"]
    [url] = [urllib.parse.urljoin(page, file["url"]) for file in files if file["filename"] == name]
    with urllib.request.urlopen(url, timeout=600) as answer:
        data: bytes = answer.read()
    return data
