"""The result of the level `times`, as text lines and as JSON values. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from dalsegno.terminal import tables
from dalsegno.terminal.tables import Column
from dalsegno.what_if.times import Measure, Predicted, Times

_NAMES: Final = {"throughput": "throughput, tokens/s"}
_CALIBRATION: Final = (
    Column("", 22),
    Column("recorded", 10, is_right=True),
    Column("simulated", 10, is_right=True),
    Column("error", 7, is_right=True),
)
_PREDICTED: Final = (
    *_CALIBRATION,
    Column("what if", 10, is_right=True),
    Column("lowest", 10, is_right=True),
    Column("highest", 10, is_right=True),
)

_NOTHING: Final = Predicted(value=None, low=None, high=None)


def calibration_lines(calibration: Mapping[str, Measure]) -> Iterator[str]:
    """The recorded run, and its simulation."""
    yield from tables.plain_lines(_CALIBRATION, [_row(name, one) for name, one in calibration.items()])


def lines(found: Times, requests: int, settings: Sequence[str]) -> Iterator[str]:
    """The report."""
    yield f"what if {', '.join(settings)}: times, simulated with costs of the recorded run"
    rows = []
    for name, one in found.calibration.items():
        predicted = found.predicted.get(name, _NOTHING)
        rows.append([*_row(name, one), *map(_number, (predicted.value, predicted.low, predicted.high))])
    yield from tables.plain_lines(_PREDICTED, rows)
    for name, value in found.baseline.items():
        if name in found.predicted:
            yield f"{_NAMES.get(name, name)} of the trace with the recorded configuration: {_number(value)}"
    yield (
        f"{requests:,} {'request' if requests == 1 else 'requests'}; lowest and highest of {found.seeds} "
        f"{'simulation' if found.seeds == 1 else 'simulations'}, with costs of resampled logs"
    )
    for node, cost in found.costs.items():
        yield (
            f"{node}: a step takes {cost['step_s'] * 1e3:.3f} ms, {cost['row_s'] * 1e3:.3f} ms more per row "
            f"and {cost['token_s'] * 1e3:.3f} ms more per prompt token"
        )
    if found.outcomes["recorded"] != found.outcomes["simulated"]:
        was, then = (_counts(found.outcomes[side]) for side in ("recorded", "simulated"))
        yield f"outcomes: {was} {'recorded' if not found.baseline else 'as configured'}; {then} then"
    yield from (f"note: {note}" for note in found.notes)


def as_plain(found: Times, requests: int, settings: Sequence[str]) -> dict[str, Any]:
    """The report as JSON values."""
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return {"level": "times", "set": list(settings), **plain, "count": requests}


def _row(name: str, one: Measure) -> list[str]:
    error = "-" if one.error is None else f"{one.error:.1%}"
    return [_NAMES.get(name, name), _number(one.recorded), _number(one.simulated), error]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(outcomes.items()))
