"""The download of one file into the cache: resumed where a part is there, verified, moved into place.

    blobs/<digest>.part     what has arrived; locked by the process that writes it, kept when that ends
    blobs/<digest>          the whole file, after its digest was compared with the hub's
    snapshots/<commit>/...  a link to it

huggingface_hub's `hf_hub_download` writes to a file of each process's own and starts again after a kill, and
compares no digests; so its parts are used here: its client, its retries and its `http_get`.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self
from urllib.parse import urlsplit

from dalsegno.hub.errors import DamagedDownloadError, HubError, of_disk, of_hub
from dalsegno.hub.listing import Hub, HubFile, Listing
from models.checkpoints.hub_cache import storage

if TYPE_CHECKING:
    from types import TracebackType

_ATTEMPTS: Final = 2
"""A file with a wrong digest is downloaded once more from the beginning."""
_READ_BYTES: Final = 8 << 20


class Stopped(Exception):  # noqa: N818 - it is not an error
    """Another file has failed: this download ends, and its part is kept."""


def place(hub: Hub, listing: Listing, file: HubFile) -> Path:
    """The path of a file in the folder of its commit."""
    return storage(hub.cache, listing.repository) / "snapshots" / listing.commit / file.path


def blob(hub: Hub, listing: Listing, file: HubFile) -> Path:
    """The path of the content of a file."""
    return storage(hub.cache, listing.repository) / "blobs" / file.digest


def part(whole: Path) -> Path:
    """The path of what has arrived of a content."""
    return whole.with_name(f"{whole.name}.part")


def missing_bytes(hub: Hub, listing: Listing, file: HubFile) -> int:
    """The bytes of a file that have to be downloaded."""
    whole = blob(hub, listing, file)
    if _is_whole(place(hub, listing, file), file) or _is_whole(whole, file):
        return 0
    with suppress(OSError):
        return max(file.size - part(whole).stat().st_size, 0)
    return file.size


def ensure(
    hub: Hub,
    listing: Listing,
    file: HubFile,
    *,
    report: Callable[[int], None],
    stop: Event,
    wait: Callable[[], None],
) -> None:
    """Have a file of a commit in the cache. Blocks; in one process of the machine, others wait.

    `report` is called with the bytes as they arrive, a negative number if they were of no use; `wait` before
    another process's download of the file is waited for. `stop` ends the download soon, with `Stopped`.

    Raises:
        HubError, HubUnavailableError: it cannot be downloaded.
    """
    link, whole = place(hub, listing, file), blob(hub, listing, file)
    with of_disk(hub.cache):
        if _is_whole(link, file):
            return
        whole.parent.mkdir(parents=True, exist_ok=True)
        while not _is_whole(whole, file):
            with part(whole).open("ab+") as opened:
                _lock(opened, wait)
                if _is_at(part(whole), opened):  # or it was completed, or discarded, by the process before
                    _complete(hub, listing, file, opened, report, stop)
                    opened.flush()
                    os.fsync(opened.fileno())
                    part(whole).replace(whole)
        _link(link, whole)


def _complete(
    hub: Hub, listing: Listing, file: HubFile, opened: BinaryIO, report: Callable[[int], None], stop: Event
) -> None:
    """Download what a part lacks, and compare the digest."""
    for _ in range(_ATTEMPTS):
        if opened.seek(0, os.SEEK_END) > file.size:
            opened.truncate(0)
        if opened.tell() < file.size:
            _get(hub, listing, file, opened, report, stop)
        found = _digest(opened, file)
        if found == file.digest:
            return
        report(-opened.tell())
        opened.truncate(0)
    raise DamagedDownloadError(
        f"{file.path} of {listing.name} was damaged on its way, {_ATTEMPTS} times: expected the digest "
        f"{file.digest}, found {found}; try again later, or another HF_ENDPOINT"
    )


def _get(
    hub: Hub, listing: Listing, file: HubFile, opened: BinaryIO, report: Callable[[int], None], stop: Event
) -> None:
    """Append to a part what it lacks."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import get_hf_file_metadata, http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(listing.repository, file.path, revision=listing.commit, endpoint=hub.endpoint)
    token = hub.token or False
    with of_hub(listing.name, hub.endpoint, has_token=bool(hub.token)):
        found = get_hf_file_metadata(
            url, token=token, library_name="dalsegno", endpoint=hub.endpoint, retry_on_errors=True
        )
        is_theirs = urlsplit(found.location)[:2] != urlsplit(url)[:2]
        headers = build_hf_headers(token=False if is_theirs else token, library_name="dalsegno")
        headers["Accept-Encoding"] = "identity"
        begun = opened.seek(0, os.SEEK_END)
        try:
            http_get(
                found.location,
                opened,
                resume_size=begun,
                headers=headers,
                expected_size=file.size,
                displayed_filename=file.path,
                tqdm_class=_meter(report, stop),
            )
        except ValueError as error:  # more than the hub gives over plain HTTP
            raise HubError(
                f"{file.path} of {listing.name} has {file.size} bytes, more than a hub sends in one piece: "
                f"download it with `hf download {listing.repository}`, which is then used"
            ) from error
        except OSError as error:
            if error.errno is not None or type(error) is not OSError:
                raise
            opened.flush()
            raise DamagedDownloadError(  # huggingface_hub has repeated what can be repeated
                f"{file.path} of {listing.name} arrived incomplete: expected {file.size} bytes, found "
                f"{opened.seek(0, os.SEEK_END)}; start again, the download continues"
            ) from error


def _meter(report: Callable[[int], None], stop: Event) -> Any:
    """The class of a progress bar, as `http_get` uses it."""

    class Meter:
        def __init__(self, **_: object) -> None: ...

        def update(self, count: int = 1) -> None:
            report(count)
            if stop.is_set():
                raise Stopped

        def __enter__(self) -> Self:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
        ) -> None: ...

    return Meter


def _digest(opened: BinaryIO, file: HubFile) -> str:
    """The digest of a part, of the kind that the hub lists for the file."""
    opened.flush()
    size = opened.seek(0, os.SEEK_END)
    if file.sha256 is not None:
        counted = hashlib.sha256()
    else:
        counted = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)  # as git names its files
    opened.seek(0)
    while read := opened.read(_READ_BYTES):
        counted.update(read)
    return counted.hexdigest()


def _is_whole(path: Path, file: HubFile) -> bool:
    try:
        return path.stat().st_size == file.size
    except FileNotFoundError:
        return False


def _is_at(path: Path, opened: BinaryIO) -> bool:
    """True if an opened file is still the one at a path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(opened.fileno()))
    except FileNotFoundError:
        return False


def _lock(opened: BinaryIO, wait: Callable[[], None]) -> None:
    """Lock a part until it is closed. The lock of a process that was killed is gone with it."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        wait()
        fcntl.flock(opened, fcntl.LOCK_EX)


def _link(link: Path, whole: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(whole, link.parent))
    beside.replace(link)
