"""Assembly of a conductor's sealer from its configuration: key, trusted keys and anchors."""

import logging
from pathlib import Path
from typing import Final

from conductor.sealing.anchoring import Anchoring, Place
from conductor.sealing.places import FilePlace, place_of
from conductor.sealing.sealer import Sealer
from configs import seal_keys
from configs.deployment import ConfigError, DeploymentConfig
from configs.seal_keys import NoPlaceForKeyError
from shared.log.port import Log
from shared.sealing.keys import fingerprint
from shared.subjects import Subjects

_LOGGER: Final = logging.getLogger(__name__)


async def sealer_of(config: DeploymentConfig, log: Log, subjects: Subjects) -> Sealer | None:
    """Return the sealer; None if the log is not to be sealed, or there is no place for a key.

    Raises:
        ConfigError: a configured key cannot be used, or is in the data dir.
        LogUnavailableError: the log does not answer.
    """
    settings = config.sealing
    if not settings.enabled:
        _LOGGER.warning("the log is not sealed (sealing.enabled): changes of it cannot be proven")
        return None
    try:
        found = seal_keys.signing_key(settings)
    except NoPlaceForKeyError as error:
        _LOGGER.warning("THE LOG IS NOT SEALED, so changes of it cannot be proven: %s", error.message)
        return None
    created_ns = (await log.state()).created_ns
    anchor_file = seal_keys.anchor_file(settings, subjects.stream, created_ns)
    for name, path in (("sealing.key_file", Path(found.source)), ("sealing.anchor_dir", anchor_file)):
        _refuse_in_data_dir(name, path, config.data_dir)
    if found.is_new:
        _LOGGER.info("made the sealing key %s; its public key is %s", found.source, found.key.public.hex())
    places: list[Place] = [FilePlace(anchor_file), *map(place_of, settings.anchors)]
    _LOGGER.info("sealing with key %s; anchors in %s", fingerprint(found.key.public), anchor_file)
    return Sealer(
        log,
        subjects,
        found.key,
        trusted=seal_keys.trusted_keys(settings),
        interval_s=settings.interval_s,
        max_age_s=config.nats.max_age_s,
        anchoring=Anchoring(places),
    )


def _refuse_in_data_dir(name: str, path: Path, data_dir: str | None) -> None:
    if data_dir is not None and path.resolve().is_relative_to(Path(data_dir).resolve()):
        raise ConfigError(
            f"{name}: {path} is in the data dir {data_dir}: whoever can change the log there could also sign "
            "it; name a place outside"
        )
