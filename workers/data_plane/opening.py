"""A worker's store as its configuration wants it: `data_plane`, with the ways that this rank may take."""

from shared.config import ConfigError, DataPlaneSettings
from workers.data_plane.store import ArenaStore, open_store
from workers.data_plane.transports.choice import Network, chosen


def open_configured(settings: DataPlaneSettings, rank: int) -> ArenaStore:
    """The store of a rank; whoever opens it closes it.

    Raises:
        ConfigError: it cannot be as it is configured: no such memory, address or port here, or no library for
            a transport.
    """
    network = Network.of_rank(rank, settings.address, settings.port)
    try:
        return open_store(
            total_bytes=settings.arena_bytes,
            transports=chosen(settings.transports, network),
            memory=settings.memory,
        )
    except (OSError, ValueError) as error:
        where = f"arena_bytes {settings.arena_bytes}, address {network.address!r}, port {network.port}"
        raise ConfigError(f"data_plane of rank {rank} ({where}): {error}") from error
