"""Actions, states and goals of a request as arrays. No torch."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from models.vjepa2_ac.options import Numbers, VJepa2AcOptions
from models.vjepa2_ac.settings import AcSettings
from shared.errors import ClientError

Floats = npt.NDArray[np.float32]

ACTION: Final = 7
EXTRINSICS: Final = 6
_MOST_BYTES: Final = 1 << 30
"""The most bytes of the latents of all candidates."""


def array_of(name: str, numbers: Numbers | None, width: int) -> Floats:
    """The numbers of an option, (rows, width) or (candidates, rows, width).

    Raises:
        ClientError: they have another shape, are missing, or are not finite.
    """
    expected = f"{name}: expected rows of {width} numbers, or a list of such rows for each candidate"
    if numbers is None:
        raise ClientError(f"{expected}; found none")
    try:
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            found = np.array(numbers, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ClientError(f"{expected}; found rows of several lengths") from error
    if found.ndim not in (2, 3) or found.shape[-1] != width or not found.size:
        raise ClientError(f"{expected}; found the shape {found.shape}")
    if not np.isfinite(found).all():
        raise ClientError(f"{name}: expected finite numbers")
    return found


def controls_of(options: VJepa2AcOptions, settings: AcSettings) -> Floats:
    """Actions, states and extrinsics side by side, (candidates, steps, 14 or 20).

    Raises:
        ClientError: they do not fit one another.
    """
    parts = {
        "actions": array_of("actions", options.actions, ACTION),
        "states": array_of("states", options.states, ACTION),
    }
    if settings.use_extrinsics:
        parts["extrinsics"] = array_of("extrinsics", options.extrinsics, EXTRINSICS)
    elif options.extrinsics is not None:
        raise ClientError("extrinsics: expected none: this checkpoint does not take the pose of the camera")
    threes = {name: part if part.ndim == 3 else part[None] for name, part in parts.items()}
    shapes = {name: part.shape[:2] for name, part in threes.items()}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ClientError(f"states: expected as many as actions (candidates, steps), found {found}")
    return np.concatenate([*threes.values()], axis=-1)


def clip_controls(options: VJepa2AcOptions, settings: AcSettings, steps: int) -> Floats:
    """The controls of a clip: one for each of its latent frames; of one candidate, unless it is scored.

    Raises:
        ClientError: there are others, or the latents of all candidates would be too large.
    """
    found = controls_of(options, settings)
    if found.shape[1] != steps:
        raise ClientError(
            f"actions: expected one for each {settings.tubelet_size} frames of the clip, {steps}, found "
            f"{found.shape[1]}; num_frames chooses the number of frames"
        )
    if len(found) > 1 and not options.mpc:
        raise ClientError(f"actions: expected those of one candidate without mpc, found {len(found)}")
    size = 4 * len(found) * steps * settings.patches * settings.hidden_size
    if size > _MOST_BYTES:
        raise ClientError(
            f"actions: {len(found)} candidates need {size} bytes of latents, expected at most {_MOST_BYTES}: "
            "send fewer at once, or set num_frames"
        )
    return found


def rollout_controls(options: VJepa2AcOptions, settings: AcSettings) -> Floats:
    """The controls of a rollout, (steps, 14 or 20).

    Raises:
        ClientError: there are fewer than frames are wanted, or of several candidates.
    """
    found = controls_of(options, settings)
    if len(found) > 1 or found.shape[1] < options.rollout_horizon:
        raise ClientError(
            f"actions: expected at least {options.rollout_horizon} of one candidate for a rollout of so many "
            f"frames, found {found.shape[:2]} (candidates, steps)"
        )
    return found[0, : options.rollout_horizon]


def pose_of(options: VJepa2AcOptions, settings: AcSettings) -> Floats:
    """The present pose of a plan, (1, 7).

    Raises:
        ClientError: there are several, or other parameters that a plan does not take.
    """
    if options.actions is not None:
        raise ClientError("actions: expected none: they are planned; with mpc, given ones are scored")
    if settings.use_extrinsics or options.extrinsics is not None:
        raise ClientError("extrinsics: plans do not take the pose of the camera")
    found = array_of("states", options.states, ACTION)
    if found.size != ACTION:
        raise ClientError(f"states: expected one, the present pose, found the shape {found.shape}")
    return found.reshape(1, ACTION)


def goal_of(options: VJepa2AcOptions, latents: int, width: int) -> Any:
    """The latents of a goal, (1, latents, width) float32.

    Raises:
        ClientError: there is none, or it has another shape.
    """
    if options.goal_hidden is None and options.goal_hidden_fill is not None:
        fill = np.float32(options.goal_hidden_fill)
        if not np.isfinite(fill):
            raise ClientError(f"goal_hidden_fill: expected a float32, found {options.goal_hidden_fill}")
        return np.full((1, latents, width), fill, np.float32)
    found = array_of("goal_hidden", options.goal_hidden, width)
    found = found if found.ndim == 3 else found[None]
    if found.shape != (1, latents, width):
        raise ClientError(f"goal_hidden: expected the shape {(1, latents, width)}, found {found.shape}")
    return found
