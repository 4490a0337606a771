"""The files that are downloaded for families with several folders or further repositories."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.files import configs_folder
from dalsegno.hub import fetching
from dalsegno.hub.errors import NotOnHubError
from dalsegno.hub.listing import Hub
from models import registry
from models.checkpoints.hub_cache import HubName
from models.orpheus.weight_files import REPOSITORY as SNAC
from models.orpheus.weight_files import find_snac
from tests.dalsegno.hub.fake_hub import FakeHub
from tests.tiny.bagel import bagel_checkpoint
from tests.tiny.omni import tiny_omni
from tests.tiny.orpheus import tiny_orpheus
from tests.tiny.pi import tiny_pi05

pytestmark = pytest.mark.processes

NAME = HubName(repository="org/model")


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub().running() as fake:
        yield fake


def fetched(hub: FakeHub, cache: Path) -> Path:
    return fetching.fetch(NAME, Hub(cache=cache, endpoint=hub.endpoint), lambda _: None)


def pipeline() -> Path:
    """A pipeline of diffusers, with a folder for each part."""
    return configs_folder() / "demo_draw" / "checkpoint"


@pytest.mark.parametrize("build", [bagel_checkpoint, tiny_omni, tiny_pi05, pipeline])
def test_a_family_has_all_its_weights(hub: FakeHub, tmp_path: Path, build: Callable[[], Path]) -> None:
    checkpoint = build()
    hub.add(NAME.repository, checkpoint)

    folder = fetched(hub, tmp_path)

    family, name_files = registry.family_of(checkpoint), registry.weight_files(registry.family_of(checkpoint))
    assert name_files is not None
    for node in registry.graph(family).nodes:
        for path in name_files(checkpoint, node, {}).values():
            assert (folder / path.relative_to(checkpoint)).exists() == path.exists(), path


def test_the_codec_of_orpheus_is_downloaded_from_its_repository(hub: FakeHub, tmp_path: Path) -> None:
    checkpoint = tiny_orpheus()
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    hub.repositories = {
        NAME.repository: files,
        SNAC: {"config.json": b"{}", "pytorch_model.bin": b"weights", "README.md": b""},
    }

    folder = fetched(hub, tmp_path)

    found = find_snac(folder, None)
    assert sorted(path.name for path in found.iterdir()) == ["config.json", "pytorch_model.bin"]


def test_a_further_repository_that_is_missing_is_named(hub: FakeHub, tmp_path: Path) -> None:
    checkpoint = tiny_orpheus()
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    hub.repositories = {NAME.repository: files}

    with pytest.raises(NotOnHubError, match=SNAC):
        fetched(hub, tmp_path)
