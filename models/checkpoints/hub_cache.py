"""The local cache of the Hugging Face hub: names of repositories, and lookup of downloaded checkpoints.

    ~/.cache/huggingface/hub/models--canopylabs--orpheus-3b-0.1-ft/refs/main         a commit
                                                                  /snapshots/<commit>/   its files
                                                                  /blobs/<digest>        their content

Nothing is downloaded here (`dalsegno.hub` does that). The caller passes the path of the cache; the
environment is read elsewhere.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

MAIN: Final = "main"
_WORD: Final = r"[A-Za-z0-9][\w.-]*"
_NAME: Final = re.compile(rf"({_WORD}/{_WORD})(?:@({_WORD}(?:/{_WORD})*))?", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_PREFIX: Final = "models--"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model by its name on a hub: `org/name`, or `org/name@revision`.

    Attributes:
        revision: a branch, a tag or a commit.
    """

    repository: str
    revision: str = MAIN

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The name in `text`; None if it is none."""
        found = _NAME.fullmatch(text)
        return cls(repository=found[1], revision=found[2] or MAIN) if found else None

    def __str__(self) -> str:
        return self.repository if self.revision == MAIN else f"{self.repository}@{self.revision}"

    @property
    def is_commit(self) -> bool:
        """True if the revision can never mean other files."""
        return is_commit(self.revision)


def is_commit(revision: str) -> bool:
    """True for the hash of a commit in full."""
    return _COMMIT.fullmatch(revision) is not None


def storage(cache: Path, repository: str) -> Path:
    """The folder of a repository in the cache; it may not exist."""
    return cache / f"{_PREFIX}{repository.replace('/', '--')}"


def commit_of(cache: Path, name: HubName) -> str | None:
    """The commit that a name meant at its last download; None if it was never downloaded."""
    if name.is_commit:
        return name.revision
    try:
        commit = (
            (storage(cache, name.repository) / "refs" / name.revision).read_text(encoding="utf-8").strip()
        )
    except (OSError, UnicodeDecodeError, ValueError):  # absent, or not written by the hub's tools
        return None
    return commit or None


def snapshot(cache: Path, repository: str, revision: str = MAIN) -> Path | None:
    """The folder of the last download of a repository's revision; None if there is none."""
    commit = commit_of(cache, HubName(repository=repository, revision=revision))
    try:
        found = storage(cache, repository) / "snapshots" / (commit or "")
        return found if commit and found.is_dir() else None
    except (OSError, ValueError):
        return None


def origin(folder: Path) -> HubName | None:
    """The repository and the commit of a folder in a cache; None for any other folder."""
    *_, repository, snapshots, commit = ("", "", "", *folder.absolute().parts)
    if snapshots != "snapshots" or not repository.startswith(_PREFIX) or not is_commit(commit):
        return None
    return HubName(repository=repository.removeprefix(_PREFIX).replace("--", "/", 1), revision=commit)
