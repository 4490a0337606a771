"""The files of a revision as the hub lists them: names, sizes and digests.

A listing is kept beside the repository's files in the cache, so that a start without the hub knows whether
all of them are there.
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from dalsegno.hub.errors import DamagedDownloadError, of_disk, of_hub
from models.checkpoints.hub_cache import HubName, storage

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PUBLIC: Final = "https://huggingface.co"
_OURS: Final = ".dalsegno"
"""The folder of the listings, beside `blobs`, `refs` and `snapshots`."""
_SAFE: Final = re.compile(r"[^\x00-\x1f\\]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A hub and the local cache of its files.

    Attributes:
        endpoint: its address.
        is_offline: it must not be asked.
    """

    cache: Path
    endpoint: str = PUBLIC
    token: str | None = None
    is_offline: bool = False

    def api(self) -> "HfApi":
        """A client."""
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=self.token or False, library_name="dalsegno")


class HubFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a repository.

    Attributes:
        path: relative, with `/`.
        size: bytes.
        git_sha1: the digest of git of the file, or of its pointer if it is a large one.
        sha256: of a large file.
    """

    path: str
    size: Annotated[int, Meta(ge=0)]
    git_sha1: Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None

    @property
    def digest(self) -> str:
        """The digest of the content; the name of its blob in the cache."""
        return self.sha256 or self.git_sha1


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a commit, by path."""

    repository: str
    commit: Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]
    files: dict[str, HubFile]

    @property
    def name(self) -> HubName:
        return HubName(repository=self.repository, revision=self.commit)


def kept(hub: Hub, name: HubName) -> Listing | None:
    """The listing of a commit in the cache; None if there is none."""
    try:
        return msgspec.json.decode(_file(hub, name).read_bytes(), type=Listing)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return None


def ask(hub: Hub, name: HubName) -> Listing:
    """Ask the hub for a revision's commit and its files; keep the answer in the cache.

    Raises:
        HubError, HubUnavailableError: there is no such revision, or it cannot be asked for.
    """
    with of_hub(name, hub.endpoint, has_token=bool(hub.token)):
        api = hub.api()
        commit = (
            name.revision if name.is_commit else api.model_info(name.repository, revision=name.revision).sha
        )
        at = HubName(repository=name.repository, revision=str(commit))
        if (known := kept(hub, at)) is None:
            known = _listed(api, at, hub.endpoint)
    folder = storage(hub.cache, name.repository)
    with of_disk(hub.cache):
        _write(_file(hub, at), msgspec.json.encode(known))
        if not name.is_commit:
            _write(folder / "refs" / name.revision, known.commit.encode())
    return known


def _listed(api: "HfApi", at: HubName, endpoint: str) -> Listing:
    from huggingface_hub.hf_api import RepoFile

    files = {}
    for entry in api.list_repo_tree(at.repository, recursive=True, revision=at.revision):
        if isinstance(entry, RepoFile):
            large = entry.lfs.sha256 if entry.lfs is not None else None
            size = entry.lfs.size if entry.lfs is not None else entry.size
            files[entry.path] = {
                "path": entry.path, "size": size, "git_sha1": entry.blob_id, "sha256": large
            }  # fmt: skip
    try:
        found = msgspec.convert(
            {"repository": at.repository, "commit": at.revision, "files": files}, type=Listing
        )
    except msgspec.ValidationError as error:
        raise DamagedDownloadError(
            f"{endpoint} lists {at} in a way that is not a hub's ({error}): check HF_ENDPOINT"
        ) from error
    for path in found.files:
        if PurePosixPath(path).is_absolute() or ".." in path.split("/") or not _SAFE.fullmatch(path):
            raise DamagedDownloadError(
                f"{endpoint} lists a file of {at} outside of its folder ({path[:80]!r})"
            )
    return found


def _file(hub: Hub, name: HubName) -> Path:
    return storage(hub.cache, name.repository) / _OURS / f"{name.revision}.json"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    beside.replace(path)
