"""Questions about all requests of a recording, for the screens: other settings, and what was chosen from."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec

from configs.deployment import PROCESS_SECTIONS
from dalsegno.config.layers import KEYS
from dalsegno.gate.deployments import Deployments
from dalsegno.gate.examination import Recording
from dalsegno.what_if.alternatives import alternatives
from dalsegno.what_if.decision_report import sentence
from dalsegno.what_if.decisions import Change
from dalsegno.what_if.question import (
    MODEL_KEYS,
    SIMULATED,
    CannotTellError,
    Question,
    answer,
    check_source,
    without_advice,
)
from dalsegno.what_if.times import NotCalibratedError

SHOWN: Final = 1_000
"""Changed decisions in an answer; the others are counted."""


def settings_of(configs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings that can be changed, with their recorded values.

    `recorded` is None for a setting that was left at its default; with several recorded configurations, the
    newest one counts.
    """
    newest: Any = next(reversed(configs.values()), {})
    names = [
        *(name for name in KEYS if _is_asked(name)),
        *(f"model_kwargs.{name}" for name in sorted(SIMULATED)),
    ]
    return [
        {
            "name": name,
            "recorded": _value(newest, name),
            "default": _plain(KEYS[name].default) if name in KEYS else None,
            "choices": _choices(KEYS[name].type) if name in KEYS else [],
        }
        for name in names
    ]


def _is_asked(name: str) -> bool:
    if name.partition(".")[0] in PROCESS_SECTIONS or name in MODEL_KEYS:
        return False
    # Maps and lists are too long for a row of a table; they can be written all the same.
    return get_origin(_bare(KEYS[name].type)) not in (dict, list, tuple)


def _bare(kind: Any) -> Any:
    """The type without its bounds: that of `Annotated[int, Meta(ge=1)]` is int."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return _plain(config)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else None


def _choices(kind: Any) -> list[str]:
    kind = _bare(kind)
    return [str(one) for one in get_args(kind)] if get_origin(kind) is Literal else []


def alternatives_at(recording: Recording, seq: int) -> dict[str, Any]:
    """Return what was chosen from at a position, as JSON values: `cannot` says why that is not known."""
    try:
        check_source(recording)
    except CannotTellError as error:
        return {"cannot": error.message}
    if recording.history is not None:
        return {"cannot": "a bundle has one request, and ranks are chosen for all: open the log itself"}
    epochs_of = Deployments(recording.configs).of_epochs
    found = alternatives(recording.records, epochs_of, recording.subjects, seq)
    return {"cannot": without_advice(found)} if isinstance(found, str) else msgspec.to_builtins(found)


def answered(
    recording: Recording, changes: Sequence[str], level: Literal["decisions", "times"], last: int | None
) -> dict[str, Any]:
    """Return the answer as JSON values: `cannot` says why a recording does not tell.

    Raises:
        ConfigError: a change is no setting, or changes nothing that a recording tells.
    """
    try:
        lines, data = answer(recording, Question(changes=changes, level=level, last=last))
    except NotCalibratedError as error:
        return {"cannot": error.message, "calibration": msgspec.to_builtins(error.calibration)}
    except CannotTellError as error:
        return {"cannot": error.message, "calibration": {}}
    if level == "times":
        return {**data, "lines": lines}
    changed = data["changes"]
    shown = [one | {"text": sentence(msgspec.convert(one, Change))} for one in changed[:SHOWN]]
    return {**data, "count": len(changed), "changes": shown}
