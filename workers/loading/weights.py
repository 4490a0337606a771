"""Digests of what a rank loads, by node: recorded when it joins, so that no answer is of two models (ADR 27).

    CPU node         the files of processing: tokenizer, chat template, generation config, config.json
    KV node          these, its weights, and those of its draft model
    stateless node   its weights, and what its family reads for it

The digests are of names and contents, so the same checkpoint has the same digest in every folder and on every
machine. They are computed in threads while the rank loads (`models.checkpoints.digests`). No torch.
"""

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Final, Self

from configs.deployment import DeploymentConfig
from models import registry
from models.base import EngineKind
from models.checkpoints.contents import Files, all_weights, processing_files, within
from models.checkpoints.digests import DigestCache, OpenedFiles, combined_digest
from workers.machine.cores import cores
from workers.settings import EngineSettings

_LOGGER: Final = logging.getLogger(__name__)

SHOWN_CHARS: Final = 12
"""Characters of a digest in messages for people."""
_MAPPED: Final = ".safetensors"
"""The files that the tensors on a CPU are pages of."""
_CORES_PER_THREAD: Final = 4
"""Most cores stay with the imports and the load that run at the same time."""


@dataclass(slots=True)
class RankWeights:
    """The files of a rank's nodes, opened before they are loaded, and their digests, computed meanwhile."""

    nodes: Mapping[str, Files]
    opened: OpenedFiles
    _digests: "Future[dict[str, str]]" = field(default_factory=Future)
    _thread: Thread | None = None

    @classmethod
    def open(
        cls, config: DeploymentConfig, settings: EngineSettings, rank: int, cache: DigestCache | None = None
    ) -> Self:
        """Find and open the files. Blocks a little.

        Raises:
            CheckpointError: a checkpoint of the rank was not found.
        """
        nodes = {node: _files_of(config, settings, node) for node in config.nodes_of(rank)}
        paths = [path for files in nodes.values() for path in files.values()]
        return cls(nodes, OpenedFiles.open(paths, cache or DigestCache(_cache_folder())))

    def begin(self) -> None:
        """Compute the digests in a thread of their own."""
        self._thread = Thread(target=self._compute, name="digests", daemon=True)
        self._thread.start()

    def digest_of(self, node: str) -> str:
        """The digest of a node's files. Blocks until it is computed.

        Raises:
            CheckpointReplacedError: a file changed meanwhile.
            DigestsCancelledError: the rank does not load any more.
        """
        return self._digests.result()[node]

    def loaded(self) -> dict[str, str]:
        """The digest of each node, after the load. Blocks until they are computed.

        Raises:
            CheckpointReplacedError: a file changed since it was opened.
        """
        found = self._digests.result()
        self.opened.check()
        return found

    def check_unwritten(self) -> None:
        """Check that no weights were written to: on a CPU, the loaded tensors are the pages of their files.

        Raises:
            CheckpointReplacedError: a file was written to.
        """
        self.opened.check_unwritten(
            path for files in self.nodes.values() for path in files.values() if path.suffix == _MAPPED
        )

    def close(self) -> None:
        """End the computation soon, if it still runs, and close the files."""
        self.opened.cancel()
        if self._thread is not None:
            self._thread.join()
        self.opened.close()

    def _compute(self) -> None:
        begun_s = time.monotonic()
        try:
            found = self.opened.digests(max(1, cores() // _CORES_PER_THREAD))
            digests = {
                node: combined_digest({name: found[path] for name, path in files.items() if path in found})
                for node, files in self.nodes.items()
            }
        except BaseException as error:  # noqa: BLE001 - raised in the threads that wait for the digests
            self._digests.set_exception(error)
        else:
            _LOGGER.info(
                "weights %s: %.2f GB in %d files, digested in %.2f s",
                rank_digest(digests)[:SHOWN_CHARS],
                self.opened.size / 1e9,
                len(found),
                time.monotonic() - begun_s,
            )
            self._digests.set_result(digests)


def rank_digest(nodes: Mapping[str, str]) -> str:
    """The digest of all nodes of a rank."""
    return combined_digest(nodes) if nodes else ""


def _files_of(config: DeploymentConfig, settings: EngineSettings, node: str) -> Files:
    """The files that decide what a node computes, by the name that they have on every machine."""
    checkpoint, kind = Path(config.checkpoint), registry.graph(config.model).nodes[node]
    if kind is EngineKind.CPU:
        return processing_files(checkpoint)
    files = _weights_of(config, checkpoint, node)
    if kind is not EngineKind.KV:
        return files
    files = {**processing_files(checkpoint), **files}
    if settings.speculative_tokens and settings.draft_model is not None:
        draft = Path(settings.draft_model)
        files |= within("draft_model", {**processing_files(draft), **_weights_of(config, draft, node)})
    return files


def _weights_of(config: DeploymentConfig, checkpoint: Path, node: str) -> Files:
    """The weights of a node: as its family names them, else all that the configured folders have."""
    kwargs, named = config.model_kwargs, registry.weight_files(config.model)
    if named is not None:
        return named(checkpoint, node, kwargs)
    files = {**processing_files(checkpoint), **all_weights(checkpoint)}
    for key in sorted(registry.graph(config.model).paths & kwargs.keys()):
        path = Path(str(kwargs[key])).expanduser()
        files |= within(key, {**processing_files(path), **all_weights(path)} or {path.name: path})
    return files


def _cache_folder() -> Path | None:
    """The user's folder for digests; None for a user without a home."""
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "dalsegno" / "digests"
    except RuntimeError:
        return None
