"""Access to the NATS server: the credentials of a role, and the retention that the stream is asked for."""

from pathlib import Path

from configs.deployment import MediaSettings, NatsSettings
from configs.secrets import secret_in
from shared.log.nats.credentials import Credentials
from shared.log.nats.durability import StreamPolicy


def stream_policy(
    settings: NatsSettings, media: MediaSettings, *, syncs_always: bool = False
) -> StreamPolicy:
    """The retention and durability that are required of the streams of the log and of media.

    `syncs_always`: the server is a private one that was configured to sync every write.
    """
    return StreamPolicy(
        durability=settings.durability,
        monitors=settings.monitors,
        syncs_always=syncs_always,
        max_bytes=settings.max_bytes,
        max_age_s=settings.max_age_s,
        max_consumers=settings.max_consumers,
        media_max_bytes=media.store_bytes,
    )


def nats_credentials(settings: NatsSettings, role: str) -> Credentials:
    """The credentials of `role` (`gateway`, `worker-0`, ...), from the settings or from their files.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
        CredentialsError: the credentials cannot be used.
    """
    found: dict[str, str | None] = {}
    if settings.seed:
        found["seed"] = settings.seed
    elif settings.credentials_file is not None:
        found["seed"] = _nats_seed(Path(settings.credentials_file), role)
    elif settings.user or settings.password:
        found |= {"user": settings.user or None, "password": settings.password or None}
    else:
        found["token"] = _nats_token(settings)
    return Credentials(
        **found, ca_file=settings.ca_file, cert_file=settings.cert_file, key_file=settings.key_file
    )


def _nats_token(settings: NatsSettings) -> str | None:
    if settings.token or settings.token_file is None:
        return settings.token or None
    return secret_in(Path(settings.token_file), "nats.token_file", "the token of the NATS server")


def _nats_seed(path: Path, role: str) -> str:
    if path.is_dir():
        path = path / f"{role}.nk"
    return secret_in(path, "nats.credentials_file", "an nkey's seed")
