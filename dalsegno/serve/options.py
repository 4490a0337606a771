"""Arguments of `dalsegno serve`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.config.layers import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Arguments of `dalsegno serve`.

    Attributes:
        model: a name in `configs/`, a YAML file, a checkpoint folder, or on a hub.
        settings: configuration keys set by flags.
        ready_file: receives a `RunningDeployment` as JSON once the deployment is ready.
        profile: receives the timeline of all processes after they have ended (`dalsegno.serve.profile`).
    """

    model: str
    settings: Sequence[Setting]
    ready_file: Path | None
    profile: Path | None = None
