"""The files of a repository that a family needs. Never code: nothing is taken that is not named here.

Configuration first: JSON, tokenizers, templates, of all folders. They tell the family, and its own
`weight_files` then names the weights. That function looks at a folder, so it is shown one: links to the
configuration, and an empty file for each other file that the hub lists.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Final

from dalsegno.hub.listing import HubFile, Listing
from models import registry
from models.checkpoints.contents import PROCESSING, WEIGHTS, safetensors
from models.checkpoints.files import CheckpointError

_CODE: Final = (".py", ".so", ".sh", ".ipynb")
_SHOWN: Final = (*WEIGHTS, "*.pickle", "*.pkl", "*.msgpack", "*.h5")


def configuration(listing: Listing) -> list[HubFile]:
    """The small files that tell what a model is."""
    return [file for file in listing.files.values() if _is_configuration(file.path)]


def weights(listing: Listing, folder: Path) -> list[HubFile]:
    """The files that the nodes of the model load, by its configuration in `folder`.

    Raises:
        ClientError: no family serves the model, or its configuration is damaged.
    """
    with _shown(listing, folder) as shown:
        names = _names_of(shown)
    return [listing.files[name] for name in sorted(names) if name in listing.files and not _is_code(name)]


def absent(folder: Path) -> list[str] | None:
    """The weights that a folder of the cache lacks, by its own files; None if it names none."""
    names = _names_of(folder)
    if not any(_is_weight(name) for name in names):
        return None
    return sorted(name for name in names if not (folder / name).exists())


def further_repositories(folder: Path) -> Mapping[str, Sequence[str]]:
    """The names of the files that the family of the model in `folder` reads, by further repository."""
    return registry.further_repositories(registry.family_of(folder), folder)


def named(listing: Listing, names: Sequence[str], *, with_weights: bool) -> list[HubFile]:
    """The files of those names; a pickle only where there is no safetensors file."""
    found = [listing.files[name] for name in names if name in listing.files]
    safe = any(file.path.endswith(".safetensors") for file in found)
    return [
        file
        for file in found
        if not _is_weight(file.path) or (with_weights and (file.path.endswith(".safetensors") or not safe))
    ]


def safetensors_of(folder: Path) -> list[Path]:
    """The safetensors files in a folder that the nodes of its model load, as far as they are there."""
    found = (folder / name for name in sorted(_names_of(folder)) if name.endswith(".safetensors"))
    return [path for path in found if path.is_file()]


def is_weight(file: HubFile) -> bool:
    """True for a file with weights."""
    return _is_weight(file.path)


def _names_of(folder: Path) -> set[str]:
    """The relative paths of the files that the nodes of the model in `folder` load."""
    family = registry.family_of(folder)
    name_files = registry.weight_files(family)
    found: set[Path] = set()
    for node in registry.graph(family).nodes:
        if name_files is None:
            found |= set(safetensors(folder).values())
            continue
        try:
            found |= set(name_files(folder, node, {}).values())
        except CheckpointError:  # it reads a further repository: the loader says what is missing
            continue
    return {path.relative_to(folder).as_posix() for path in found if path.is_relative_to(folder)}


@contextmanager
def _shown(listing: Listing, folder: Path) -> Iterator[Path]:
    """A folder with links to the configuration and with empty files instead of weights."""
    with tempfile.TemporaryDirectory(prefix="dalsegno-") as name:
        shown = Path(name)
        for path in listing.files:
            place = shown / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if _is_configuration(path):
                place.symlink_to((folder / path).absolute())
            elif _matches(path, _SHOWN):
                place.touch()
        yield shown


def _is_configuration(path: str) -> bool:
    return _matches(path, PROCESSING) and not _is_code(path)


def _is_weight(path: str) -> bool:
    return _matches(path, WEIGHTS)


def _is_code(path: str) -> bool:
    return path.endswith(_CODE)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    name = PurePosixPath(path).name
    return any(fnmatchcase(name, PurePosixPath(pattern).name) for pattern in patterns)
