"""Models by their name on a hub: what is downloaded, resumed, verified and refused."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.file_download
import huggingface_hub.utils._http
import pytest
from huggingface_hub import snapshot_download, try_to_load_from_cache

from dalsegno.hub import fetching
from dalsegno.hub.errors import (
    DamagedDownloadError,
    GatedError,
    HubCacheError,
    HubTokenError,
    HubUnavailableError,
    NotDownloadedError,
    NotOnHubError,
    NoWeightsError,
)
from dalsegno.hub.listing import Hub
from models.checkpoints.hub_cache import HubName, origin, storage
from models.registry import UnknownFamilyError
from tests.dalsegno.hub.fake_hub import FakeHub, Fault
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.processes

NAME = HubName(repository="tiny/model")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a model in three shards, code, and the same weights as a pickle."""

    class NoWait:
        @staticmethod
        def sleep(_: float) -> None: ...

    monkeypatch.setattr(huggingface_hub.utils._http, "time", NoWait)
    monkeypatch.setattr(huggingface_hub.file_download, "time", NoWait)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100)
    fake = FakeHub()
    fake.add(
        NAME.repository,
        tiny_checkpoint(shards=3),
        pytorch_model_DOT_bin=b"a pickle",
        modeling_tiny_DOT_py=b"import os",
        original__consolidated_DOT_safetensors=b"unused",
        README_DOT_md=b"read me",
    )
    with fake.running():
        yield fake


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def get(hub: FakeHub, tmp_path: Path, said: list[str]) -> Callable[..., Path]:
    def get(name: HubName = NAME, *, with_weights: bool = True, **further: Any) -> Path:
        at = Hub(cache=tmp_path / "hub", endpoint=hub.endpoint, **further)
        return fetching.fetch(name, at, said.append, with_weights=with_weights)

    return get


def weights_of(hub: FakeHub) -> list[str]:
    return sorted(name for name in hub.repositories[NAME.repository] if name.startswith("model-0"))


def test_the_folder_has_what_the_family_loads_and_no_code(get: Callable[..., Path], hub: FakeHub) -> None:
    folder = get()

    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    unneeded = {"pytorch_model.bin", "modeling_tiny.py", "original/consolidated.safetensors", "README.md"}
    files = hub.repositories[NAME.repository]
    assert found == {name: content for name, content in files.items() if name not in unneeded}
    assert origin(folder) == HubName(repository="tiny/model", revision=hub.commit("tiny/model"))


def test_the_cache_is_that_of_the_hugging_face_tools(
    get: Callable[..., Path], hub: FakeHub, tmp_path: Path
) -> None:
    folder = get()

    cache = tmp_path / "hub"
    assert try_to_load_from_cache(NAME.repository, "config.json", cache_dir=cache) == str(
        folder / "config.json"
    )
    theirs = snapshot_download(NAME.repository, cache_dir=cache, local_files_only=True)
    assert Path(theirs) == folder
    inodes = {path.name: path.stat().st_ino for path in folder.iterdir()}
    snapshot_download(NAME.repository, cache_dir=cache, endpoint=hub.endpoint, token=False)
    assert {name: (folder / name).stat().st_ino for name in inodes} == inodes


def test_a_second_start_downloads_nothing(get: Callable[..., Path], hub: FakeHub) -> None:
    first = get()
    hub.seen.clear()

    assert get() == first
    assert [one.path for one in hub.seen] == ["/api/models/tiny/model/revision/main"]


def test_a_commit_in_the_cache_is_not_asked_for(get: Callable[..., Path], hub: FakeHub) -> None:
    commit = HubName(repository=NAME.repository, revision=hub.commit(NAME.repository))
    first = get(commit)
    hub.seen.clear()

    assert get(commit) == first
    assert hub.seen == []


def test_a_branch_that_moved_is_downloaded_anew_but_for_equal_files(
    get: Callable[..., Path], hub: FakeHub
) -> None:
    first = get()
    hub.repositories[NAME.repository]["generation_config.json"] = b'{"temperature": 0.5}'
    hub.seen.clear()

    second = get()

    assert second != first
    assert (second / "generation_config.json").read_bytes() == b'{"temperature": 0.5}'
    assert hub.paths("GET", "/cdn/") == []
    assert (second / weights_of(hub)[0]).samefile(first / weights_of(hub)[0])


def test_the_configuration_alone_needs_no_weights(get: Callable[..., Path], hub: FakeHub) -> None:
    folder = get(with_weights=False)

    assert (folder / "config.json").is_file()
    assert not list(folder.glob("*.safetensors"))
    assert hub.paths("GET", "/cdn/") == []


def test_the_token_goes_to_the_hub_and_not_to_another_host(get: Callable[..., Path], hub: FakeHub) -> None:
    hub.needs_token = "hf_secret"

    get(token="hf_secret")

    assert {one.token for one in hub.seen if one.path.startswith("/cdn/")} == {None}
    assert {one.token for one in hub.seen if not one.path.startswith("/cdn/")} == {"hf_secret"}


@pytest.mark.parametrize("cut", [0, 1000])
def test_a_body_that_ends_early_is_continued(get: Callable[..., Path], hub: FakeHub, cut: int) -> None:
    hub.faults = [Fault(on="GET /cdn/", cut=cut)]

    folder = get()

    name = next(one for one in hub.seen if one.range and one.path.startswith("/cdn/")) if cut else None
    assert name is None or name.range == f"bytes={cut}-"
    for shard in weights_of(hub):
        assert (folder / shard).read_bytes() == hub.repositories[NAME.repository][shard]


def test_what_has_arrived_is_kept_for_the_next_start(
    get: Callable[..., Path], hub: FakeHub, tmp_path: Path
) -> None:
    shard = hub.repositories[NAME.repository][weights_of(hub)[0]]
    digest = hashlib.sha256(shard).hexdigest()
    hub.faults = [Fault(on=f"GET /cdn/{digest}", cut=500), *[Fault(on=f"GET /cdn/{digest}", status=503)] * 40]
    with pytest.raises(HubUnavailableError, match="503"):
        get()
    part = storage(tmp_path / "hub", NAME.repository) / "blobs" / f"{digest}.part"
    assert part.read_bytes() == shard[:500]
    hub.faults, hub.seen = [], []

    folder = get()

    assert [one.range for one in hub.seen if one.path == f"/cdn/{digest}"] == ["bytes=500-"]
    assert (folder / weights_of(hub)[0]).read_bytes() == shard
    assert not part.exists()


def test_a_server_that_ignores_ranges_sends_the_file_again(
    get: Callable[..., Path], hub: FakeHub, tmp_path: Path
) -> None:
    shard = hub.repositories[NAME.repository][weights_of(hub)[0]]
    digest = hashlib.sha256(shard).hexdigest()
    blobs = storage(tmp_path / "hub", NAME.repository) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest}.part").write_bytes(shard[:300])
    hub.faults = [Fault(on=f"GET /cdn/{digest}", is_whole=True)]

    assert (get() / weights_of(hub)[0]).read_bytes() == shard


def test_a_damaged_part_is_downloaded_again(get: Callable[..., Path], hub: FakeHub, tmp_path: Path) -> None:
    shard = hub.repositories[NAME.repository][weights_of(hub)[0]]
    digest = hashlib.sha256(shard).hexdigest()
    blobs = storage(tmp_path / "hub", NAME.repository) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest}.part").write_bytes(b"x" * 300)

    assert (get() / weights_of(hub)[0]).read_bytes() == shard


@pytest.mark.parametrize("on", ["GET /cdn/", "GET /tiny/model/resolve/"])
def test_a_file_with_another_digest_is_refused(get: Callable[..., Path], hub: FakeHub, on: str) -> None:
    hub.faults = [Fault(on=on, corrupt=True) for _ in range(40)]

    with pytest.raises(DamagedDownloadError, match="expected the digest"):
        get()

    hub.faults = []
    assert (get() / "config.json").is_file()


def test_a_file_that_was_damaged_once_is_served(get: Callable[..., Path], hub: FakeHub) -> None:
    hub.faults = [Fault(on="GET /cdn/", corrupt=True)]

    folder = get()

    for shard in weights_of(hub):
        assert (folder / shard).read_bytes() == hub.repositories[NAME.repository][shard]


GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model tiny/model is restricted"}


@pytest.mark.parametrize(
    ("fault", "token", "error", "advice"),
    [
        ({"status": 401, "headers": GATED}, None, GatedError, "no token is set.*HF_TOKEN"),
        ({"status": 403, "headers": GATED}, "hf_x", GatedError, "token's user has not accepted"),
        ({"status": 403}, "hf_x", GatedError, "forbids"),
        ({"status": 401}, None, NotOnHubError, "check the spelling, or it is private: then set HF_TOKEN"),
        (
            {"status": 401, "headers": {"X-Error-Message": "Invalid credentials in Authorization header"}},
            "hf_x",
            HubTokenError,
            "refuses our token.*set HF_TOKEN",
        ),
        ({"status": 404, "headers": {"X-Error-Code": "RepoNotFound"}}, None, NotOnHubError, "spelling"),
        (
            {"status": 404, "headers": {"X-Error-Code": "RevisionNotFound"}},
            None,
            NotOnHubError,
            "no revision",
        ),
        ({"status": 429, "headers": {"Retry-After": "30"}}, None, HubUnavailableError, "again in 30 s"),
        ({"status": 503}, None, HubUnavailableError, "status 503"),
        ({"status": 418}, None, Exception, "answered 418"),
    ],
)
def test_refusals_say_what_to_do(
    get: Callable[..., Path], hub: FakeHub, fault: dict[str, Any], token: str | None, error: type, advice: str
) -> None:
    hub.faults = [Fault(on="/api/models/", **fault) for _ in range(10)]

    with pytest.raises(error, match=advice):
        get(token=token)


def test_a_busy_hub_is_asked_again(get: Callable[..., Path], hub: FakeHub) -> None:
    hub.faults = [
        Fault(on="GET /cdn/", status=429, headers={"Retry-After": "1"}),
        Fault(on="HEAD /tiny/model/resolve", status=503),
        Fault(on="GET /api/models/tiny/model/tree", status=503),
    ]

    assert (get() / weights_of(hub)[0]).is_file()
    assert hub.faults == []


def test_a_hub_that_is_away_is_named(tmp_path: Path, said: list[str]) -> None:
    away = Hub(cache=tmp_path, endpoint="http://127.0.0.1:9")

    with pytest.raises(HubUnavailableError, match=r"http://127\.0\.0\.1:9 is not reachable for tiny/model"):
        fetching.fetch(NAME, away, said.append)


def test_the_last_download_is_served_while_the_hub_is_broken(
    get: Callable[..., Path], hub: FakeHub, said: list[str]
) -> None:
    folder = get()
    hub.faults = [Fault(on="/api/", status=503)]
    said.clear()

    assert get() == folder
    assert len(said) == 1
    assert hub.commit(NAME.repository) in said[0]


def test_offline_serves_what_is_whole(get: Callable[..., Path], hub: FakeHub) -> None:
    folder = get()
    hub.seen.clear()

    assert get(is_offline=True) == folder
    assert hub.seen == []


@pytest.mark.parametrize("keeps_listing", [True, False])
def test_offline_refuses_what_is_not_whole(
    get: Callable[..., Path], hub: FakeHub, tmp_path: Path, keeps_listing: bool
) -> None:
    with pytest.raises(NotDownloadedError, match="HF_HUB_OFFLINE is set"):
        get(is_offline=True)
    folder = get()
    (folder / weights_of(hub)[1]).unlink()
    if not keeps_listing:  # as a download of other tools
        for listing in storage(tmp_path / "hub", NAME.repository).glob(".dalsegno/*.json"):
            listing.unlink()

    with pytest.raises(NotDownloadedError, match="is not whole"):
        get(is_offline=True)
    assert get(is_offline=True, with_weights=False) == folder


def test_a_download_of_other_tools_is_used(get: Callable[..., Path], hub: FakeHub, tmp_path: Path) -> None:
    folder = snapshot_download(
        NAME.repository, cache_dir=tmp_path / "hub", endpoint=hub.endpoint, token=False
    )
    hub.seen.clear()

    assert get() == Path(folder)
    assert hub.paths("GET", "/resolve/") == hub.paths("GET", "/cdn/") == []
    assert get(is_offline=True) == Path(folder)


def test_no_weights_are_downloaded_of_what_no_family_serves(get: Callable[..., Path], hub: FakeHub) -> None:
    hub.repositories[NAME.repository]["config.json"] = b'{"architectures": ["Unheard"], "model_type": "x"}'

    with pytest.raises(UnknownFamilyError, match="Unheard"):
        get()
    assert hub.paths("GET", "/cdn/") == []


def test_a_repository_with_pickles_only_is_refused(get: Callable[..., Path], hub: FakeHub) -> None:
    files = hub.repositories[NAME.repository]
    hub.repositories[NAME.repository] = {
        name: content for name, content in files.items() if not name.endswith(("safetensors", "index.json"))
    }

    with pytest.raises(NoWeightsError, match=r"expected safetensors, found pytorch_model\.bin"):
        get()


@pytest.mark.parametrize("path", ["../../evil.json", "/evil.json", "a/../../evil.json"])
def test_a_file_outside_of_the_folder_is_refused(get: Callable[..., Path], hub: FakeHub, path: str) -> None:
    hub.listed = {path: {"size": 1, "oid": "0" * 40}}

    with pytest.raises(DamagedDownloadError, match="outside of its folder"):
        get()


def test_a_digest_that_is_a_path_is_refused(get: Callable[..., Path], hub: FakeHub) -> None:
    hub.listed = {"more.json": {"size": 1, "oid": "../../../evil"}}

    with pytest.raises(DamagedDownloadError, match="lists"):
        get()


def test_a_download_without_room_is_not_begun(
    get: Callable[..., Path], hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))

    with pytest.raises(HubCacheError, match=r"has 10 bytes: free some, or set HF_HUB_CACHE"):
        get()
    assert hub.paths("GET", "/resolve/") == []


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "has no room left"),
        (errno.EDQUOT, "has no room left"),
        (errno.EACCES, "cannot be written to"),
        (errno.EROFS, "cannot be written to"),
    ],
)
def test_errors_of_the_disk_say_what_to_do(
    get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)

    with pytest.raises(HubCacheError, match=f"{message}.*set HF_HUB_CACHE"):
        get()


def test_a_cache_that_is_a_file_is_said(get: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file")

    with pytest.raises(HubCacheError, match="cannot be written to"):
        get()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_cache_without_permission_is_said(get: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir(mode=0o500)

    with pytest.raises(HubCacheError, match="cannot be written to"):
        get()
