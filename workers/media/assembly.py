"""The media of a worker: its connection to the media store, local copies, and decoder processes."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from configs.deployment import DeploymentConfig, MediaSettings
from models import registry
from models.base import EngineKind
from models.media.kinds import MediaLimits
from shared.log.nats.credentials import Credentials
from shared.media import jetstream
from shared.media.store import MediaStore
from shared.subjects import Subjects
from workers.media.decoders import Decoders
from workers.media.fetch import LocalMedia
from workers.media.folder import own_folder
from workers.media.reader import DecodingReader

_TEXT: tuple[str, ...] = ("text",)


@dataclass(frozen=True, slots=True)
class WorkerMedia:
    """The local copies of media, and their reader, which decodes them."""

    copies: LocalMedia
    reader: DecodingReader


@asynccontextmanager
async def opened(
    config: DeploymentConfig,
    rank: int,
    url: str,
    credentials: Credentials,
    subjects: Subjects,
    *,
    patience_s: float,
) -> AsyncGenerator[WorkerMedia | None, None]:
    """Open the media of a rank; None if it has no CPU node, or its model takes text only.

    Raises:
        LogUnavailableError: no server answers for `patience_s` seconds.
    """
    graph = registry.graph(config.model)
    on_cpu = [node for node in config.nodes_of(rank) if graph.nodes[node] is EngineKind.CPU]
    if not on_cpu or graph.modalities == _TEXT:
        yield None
        return
    store = await jetstream.connect(
        url, credentials=credentials, subjects=subjects, name=f"worker {rank}", timeout_s=patience_s
    )
    try:
        with over(store, config.media) as media:
            yield media
    finally:
        await store.close()


@contextmanager
def over(store: MediaStore, settings: MediaSettings) -> Iterator[WorkerMedia]:
    """Make local copies of the media of a store, and decoder processes for them."""
    decoders = decoders_of(settings)
    try:
        with own_folder() as folder:
            copies = LocalMedia(
                store, folder, max_bytes=settings.cache_bytes, max_file_bytes=settings.max_bytes
            )
            yield WorkerMedia(copies, DecodingReader(decoders, copies.path_of))
    finally:
        decoders.close()


def decoders_of(settings: MediaSettings) -> Decoders:
    """The decoder processes of a worker; none is started before the first file."""
    limits = MediaLimits(
        max_pixels=settings.max_pixels, max_frames=settings.max_frames, max_seconds=settings.max_seconds
    )
    return Decoders(settings.decoders, settings.decode_timeout_s, limits)
