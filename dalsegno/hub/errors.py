"""Errors of hubs. Each says what was asked for, what was found and what to do.

HubError                      the name, the token or this machine is wrong; a retry does not help
├── NotOnHubError             there is no such repository or revision, or it is private
├── GatedError                its licence has to be accepted
├── HubTokenError             the token is refused
├── NotDownloadedError        offline, and not (completely) in the cache
├── NoWeightsError            the repository has no weights that can be served
├── DamagedDownloadError      what arrives is not what the hub lists
└── HubCacheError             the cache cannot be written to, or has no room
HubUnavailableError           the hub is not reachable, busy or broken; try again later
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from models.checkpoints.hub_cache import HubName
from shared.errors import CapacityError, ClientError

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class HubError(ClientError):
    """A model cannot be had from the hub."""

    code = "hub_error"


class NotOnHubError(HubError):
    """There is no such repository or revision, or this user may not see it."""

    code = "hub_not_found"


class GatedError(HubError):
    """The repository's files are given to users who have accepted its conditions."""

    code = "hub_gated"


class HubTokenError(HubError):
    """The hub refuses the token."""

    code = "hub_token"


class NotDownloadedError(HubError):
    """The hub must not be asked, and the cache does not have all files."""

    code = "hub_offline"


class NoWeightsError(HubError):
    """The repository has no weights in a format that is served."""

    code = "hub_no_weights"


class DamagedDownloadError(HubError):
    """The bytes of a file are not those that the hub lists."""

    code = "hub_damaged"


class HubCacheError(HubError):
    """The cache has no room, or cannot be written to."""

    code = "hub_cache"


class HubUnavailableError(CapacityError):
    """The hub is not reachable, busy or broken."""

    code = "hub_unavailable"


@contextmanager
def of_hub(name: HubName, endpoint: str, *, has_token: bool) -> Iterator[None]:
    """Convert the errors of huggingface_hub's client to those of this module."""
    try:
        import httpx2
        from huggingface_hub import errors
    except ModuleNotFoundError as error:  # a machine of a gateway or a conductor may have no model libraries
        raise HubError(
            f"{name} is on a hub, and its client is not installed here: pip install huggingface_hub, or name "
            "the model's folder"
        ) from error
    try:
        yield
    except errors.GatedRepoError as error:
        why = "the token's user has not accepted its conditions" if has_token else "no token is set"
        raise GatedError(
            f"{name.repository} is gated, and {why}: accept its conditions at {endpoint}/{name.repository}, "
            "then set HF_TOKEN to a token of that user"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise NotOnHubError(
            f"{name.repository} has no revision {name.revision!r} at {endpoint}: expected a branch, a tag or "
            "a commit in full"
        ) from error
    except errors.DisabledRepoError as error:
        raise NotOnHubError(f"{name.repository} is disabled at {endpoint}: choose another model") from error
    except errors.RepositoryNotFoundError as error:
        private = "the token's user may not see it" if has_token else "it is private: then set HF_TOKEN"
        raise NotOnHubError(
            f"{name.repository} was not found at {endpoint}: check the spelling, or {private}"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise NotOnHubError(f"{name}: {endpoint} lists a file that it does not have; try again") from error
    except errors.HfHubHTTPError as error:
        raise _of_status(error.response, name, endpoint, has_token=has_token) from error
    except errors.OfflineModeIsEnabled as error:
        raise NotDownloadedError(
            f"{name} is to be looked up, but HF_HUB_OFFLINE is set: unset it, or name what is in the cache"
        ) from error
    except httpx2.HTTPError as error:
        why = str(error) or type(error).__name__
        raise HubUnavailableError(
            f"{endpoint} is not reachable for {name} ({why}): check the network, HF_ENDPOINT and proxies, or "
            "set HF_HUB_OFFLINE=1 to use what is in the cache"
        ) from error


def _of_status(
    response: Any, name: HubName, endpoint: str, *, has_token: bool
) -> HubError | HubUnavailableError:
    status = response.status_code
    if status == 401:
        if has_token:
            return HubTokenError(f"{endpoint} refuses our token for {name}: set HF_TOKEN to a valid one")
        return NotOnHubError(  # hubs do not tell strangers which repositories there are
            f"{name} was not found at {endpoint}: check the spelling, or it is private: then set HF_TOKEN"
        )
    if status == 403:
        return GatedError(
            f"{endpoint} forbids {name}: accept its conditions at {endpoint}/{name.repository}, and set "
            "HF_TOKEN to a token that may read it"
        )
    if status == 404:
        return NotOnHubError(f"{name} was not found at {endpoint}: check the spelling")
    if status == 429:
        after = response.headers.get("Retry-After", "")
        when = f"in {after} s" if after.isdecimal() else "later"
        error = HubUnavailableError(
            f"{endpoint} allows no more requests now: try again {when}, or set HF_TOKEN for a higher limit"
        )
        error.retry_after_s = float(after) if after.isdecimal() else None
        return error
    if status >= 500:
        return HubUnavailableError(f"{endpoint} is broken now (status {status}, for {name}): try again later")
    return HubError(f"{endpoint} answered {status} for {name}: check HF_ENDPOINT")


@contextmanager
def of_disk(cache: Path) -> Iterator[None]:
    """Convert errors of the file system to a `HubCacheError`; errors of connections are left as they are."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise HubCacheError(
                f"{cache} has no room left: free some, or set HF_HUB_CACHE to a folder with more; what was "
                "downloaded is kept, and the next start continues"
            ) from error
        if isinstance(error, PermissionError) or error.errno in {errno.EROFS, errno.ENOTDIR, errno.EIO}:
            raise HubCacheError(
                f"{error.filename or cache} cannot be written to ({error.strerror}): set HF_HUB_CACHE to a "
                "folder of yours"
            ) from error
        raise
