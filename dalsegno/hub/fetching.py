"""A name on a hub becomes a folder of the local cache.

    the commit      the hub says what a branch means now; a commit means itself
    configuration   tells the family, or that none serves the model, before weights are downloaded
    weights         those that the family's nodes load; files of further repositories that it reads

If the hub cannot be asked, the last download is served, if it is whole, and that is said.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Final

from dalsegno.hub import download, listing, selection
from dalsegno.hub.errors import (
    HubCacheError,
    HubError,
    HubUnavailableError,
    NotDownloadedError,
    NotOnHubError,
    NoWeightsError,
)
from dalsegno.hub.listing import Hub, HubFile, Listing
from dalsegno.hub.progress import Progress, Say, in_words
from models.checkpoints.files import has_config
from models.checkpoints.hub_cache import HubName, commit_of, storage

_AT_ONCE: Final = 4
"""Files that are downloaded at once: one connection is often slower than the line."""


def fetch(name: HubName, hub: Hub, say: Say, *, with_weights: bool = True) -> Path:
    """The folder of a model: in the cache, or downloaded into it.

    `say` receives sentences for the operator. Without `with_weights`, only the configuration is downloaded.

    Raises:
        ClientError: the model cannot be had, or no family serves it.
        HubUnavailableError: the hub does not answer, and the cache does not have the model.
    """
    known = _in_cache(name, hub)
    if hub.is_offline or name.is_commit:
        if known is not None and (folder := _folder(hub, known, with_weights=with_weights)) is not None:
            return folder
        if hub.is_offline:
            raise _not_downloaded(name, hub, known)
    try:
        found = listing.ask(hub, name)
    except (HubError, HubUnavailableError) as error:
        if known is None or isinstance(error, NotOnHubError | HubCacheError):
            raise
        folder = _folder(hub, known, with_weights=with_weights)
        if folder is None:
            raise
        say(f"{error.message}. Until then {name} is its last download, commit {known.revision}.")
        return folder
    return _downloaded(hub, found, say, with_weights=with_weights)


def _downloaded(hub: Hub, found: Listing, say: Say, *, with_weights: bool) -> Path:
    folder = storage(hub.cache, found.repository) / "snapshots" / found.commit
    _ensure(hub, found, selection.configuration(found), say)
    if not has_config(folder) and not any(map(selection.is_weight, found.files.values())):
        raise NoWeightsError(f"{found.name} has no config.json and no weights: expected a model's repository")
    if with_weights:
        needed = selection.weights(found, folder)
        if not any(map(selection.is_weight, needed)):
            raise NoWeightsError(
                f"{found.name} has no weights that its family loads: expected safetensors, found "
                f"{_others(found)}; choose a repository with safetensors"
            )
        _ensure(hub, found, needed, say)
    for repository, names in selection.further_repositories(folder).items():
        further = listing.ask(hub, HubName(repository=repository))
        _ensure(hub, further, selection.named(further, names, with_weights=with_weights), say)
    return folder


def _others(found: Listing) -> str:
    names = sorted(path for path, file in found.files.items() if selection.is_weight(file))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


# ---- what is in the cache ------------------------------------------------------------------------


def _in_cache(name: HubName, hub: Hub) -> HubName | None:
    """The commit of a name's last download; None if there was none."""
    commit = commit_of(hub.cache, name)
    return HubName(repository=name.repository, revision=commit) if commit is not None else None


def _folder(hub: Hub, name: HubName, *, with_weights: bool) -> Path | None:
    """The folder of a commit if the cache has all its files, as far as they are known."""
    folder = storage(hub.cache, name.repository) / "snapshots" / name.revision
    if not has_config(folder):
        return None
    if (known := listing.kept(hub, name)) is not None:
        needed = selection.configuration(known)
        if any(download.missing_bytes(hub, known, file) for file in needed):
            return None
        needed = selection.weights(known, folder) if with_weights else []
        return None if any(_is_missing(hub, known, file) for file in needed) else folder
    return folder if not with_weights or selection.absent(folder) == [] else None


def _is_missing(hub: Hub, known: Listing, file: HubFile) -> bool:
    return not download.place(hub, known, file).exists()


def _not_downloaded(name: HubName, hub: Hub, known: HubName | None) -> NotDownloadedError:
    found = "is not whole" if known is not None else "is not there"
    return NotDownloadedError(
        f"{name} {found} in {hub.cache}, and HF_HUB_OFFLINE is set: unset it once to download the model, or "
        "set HF_HUB_CACHE to the folder that has it"
    )


# ---- downloads -----------------------------------------------------------------------------------


def _ensure(hub: Hub, found: Listing, files: Sequence[HubFile], say: Say) -> None:
    """Download the files that are not in the cache."""
    missing = sum(download.missing_bytes(hub, found, file) for file in files)
    _check_room(hub, found.name, missing)
    total = sum(file.size for file in files)
    if missing:
        say(f"downloading {found.name} from {hub.endpoint}: {in_words(missing)} to {hub.cache}")
    progress, stop = Progress(found.repository, total, total - missing), Event()

    def one(file: HubFile) -> None:
        def wait() -> None:
            say(f"another process downloads {file.path} of {found.name}; waiting for it")

        try:
            download.ensure(hub, found, file, report=progress.add, stop=stop, wait=wait)
        except download.Stopped:
            pass  # the error of the file that failed is raised
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="download") as pool:
        try:
            futures = [pool.submit(one, file) for file in files]
            failures = [future.exception() for future in futures]
        except BaseException:  # Ctrl-C: what has arrived is kept
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    if missing:
        progress.end()
    for failure in failures:
        if failure is not None:
            raise failure


def _check_room(hub: Hub, name: HubName, missing: int) -> None:
    """Refuse a download that has no room, before it begins."""
    there = next(path for path in (hub.cache, *hub.cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if missing > free:
        raise HubCacheError(
            f"{name} needs {in_words(missing)} more in {hub.cache}, which has {in_words(free)}: free some, "
            "or set HF_HUB_CACHE to a folder with more"
        )
