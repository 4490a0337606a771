"""The deployments against which recorded decisions are held. Pure, except for the files of LoRA adapters.

Without another configuration, a decision is held against the one that was in force when it was made, as the
data dir or the bundle keeps it: then a difference is one of the code. `dalsegno what-if` changes single
values of it. A conductor has one configuration, so all decisions of an epoch are made with that of its
admissions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from conductor.core.schedule import Deployment
from conductor.deployment import deployment_of
from configs.deployment import PROCESS_SECTIONS, DeploymentConfig
from configs.files import Base
from dalsegno.config import layers
from dalsegno.config.layers import Setting
from dalsegno.gate.recorded_decisions import RecordedDecisions
from shared.errors import DalSegnoError

_SHOWN_CHARS: Final = 12
_EVENT_BYTES: Final = 0
"""The log's limit for an event is not compared."""


class Deployments:
    """The deployments of one source.

    Args:
        known: the stored configurations by digest, as `DataDir.configs` returns them.
        other: the configuration to hold all decisions against; None for the recorded ones.
        settings: changes of the recorded configurations.
    """

    def __init__(
        self,
        known: Mapping[str, Any],
        other: DeploymentConfig | None = None,
        settings: Sequence[Setting] = (),
    ) -> None:
        self._known = known
        self._other = other
        self._settings = settings
        self._found: dict[str, Deployment | str] = {}

    def of(self, digest: str) -> Deployment | str:
        """The deployment of a configuration; or the reason why it is not known."""
        key = "" if self._other is not None else digest
        if key not in self._found:
            self._found[key] = self._read(digest)
        return self._found[key]

    def of_epochs(self, recorded: RecordedDecisions) -> dict[int, Deployment | str]:
        """The deployment of each epoch: that of its admissions, else of those before, else of those after."""
        digests = {number: epoch.configs[0] for number, epoch in recorded.epochs.items() if epoch.configs}
        only = next(iter(self._known)) if len(self._known) == 1 else ""
        last = next(iter(digests.values()), only)
        found: dict[int, Deployment | str] = {}
        for number in sorted(recorded.epochs):
            last = digests.get(number, last)
            found[number] = self.of(last)
        return found

    @property
    def used(self) -> list[Deployment]:
        """Those that were found so far."""
        return [one for one in self._found.values() if isinstance(one, Deployment)]

    def _read(self, digest: str) -> Deployment | str:
        try:
            config = self.config(digest)
            return config if isinstance(config, str) else deployment_of(config, max_event_bytes=_EVENT_BYTES)
        except (DalSegnoError, msgspec.ValidationError, ValueError) as error:
            return f"the configuration {digest[:_SHOWN_CHARS]} cannot be used here: {error}"

    def config(self, digest: str) -> DeploymentConfig | str:
        """The configuration itself; or the reason why it is not known.

        Raises:
            ConfigError, msgspec.ValidationError: it cannot be used here, or a changed value does not fit.
        """
        if self._other is not None:
            return self._other
        config = self._recorded(digest)
        if isinstance(config, str) or not self._settings:
            return config
        base = Base(
            values=_decisive(self._known[digest]),
            source="the recorded configuration",
            folder=Path.cwd(),
            name=config.name,
        )
        values, _ = layers.overlay(base, self._settings, Path.cwd())
        return msgspec.convert(values, DeploymentConfig, str_keys=True)

    def _recorded(self, digest: str) -> DeploymentConfig | str:
        if not digest:
            return "no admission names a configuration; name one with --config"
        known = self._known.get(digest)
        if not isinstance(known, dict):
            return "its configuration is not stored here; name one with --config"
        config = msgspec.convert(_decisive(known), DeploymentConfig)
        if "scheduling" not in known and config.digest != digest:
            return "its configuration was stored without scheduling.*; name one with --config"
        return config


def _decisive(known: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in known.items() if key not in PROCESS_SECTIONS}
