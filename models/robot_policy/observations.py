"""The names under which robots send their cameras, joints and gripper. No torch.

A request has images in the order of the model's cameras and its state as an option; or a file of arrays, with
the names of a robot's client:

    DROID      observation/exterior_image_1_left, observation/wrist_image_left,
               observation/joint_position, observation/gripper_position
    LIBERO     observation/image, observation/wrist_image, observation/state
    openpi     image/base_0_rgb, image/left_wrist_0_rgb, image/right_wrist_0_rgb, image_mask/..., state
    lerobot    observation.images.<camera>, observation.state

Nested names are joined by slashes. Arrays of other names are ignored, as openpi's server does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from models.base import MediaReader
from models.robot_policy.graph import PolicyOptions
from models.robot_policy.images import image_of
from models.robot_policy.normalization import Floats
from models.robot_policy.settings import CAMERA, PolicySettings
from shared.errors import ClientError
from shared.events import Inputs

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Image: TypeAlias = npt.NDArray[np.uint8]
TENSOR: Final = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """The cameras of a robot, and its state.

    Attributes:
        images: in the order of the model's cameras; those that the robot lacks are left out.
        state: (n,), in the robot's units.
        robot_dim: the leading numbers of an action that this robot has; None: all that the checkpoint has.
    """

    images: Sequence[Image]
    state: Floats
    robot_dim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Robot:
    """The names of one robot: `cameras` in the model's order, the parts of its state, its actions."""

    cameras: tuple[str, ...]
    state: tuple[str, ...]
    robot_dim: int | None = None
    masks: str = ""


_ROBOTS: Final = {
    "DROID": _Robot(
        cameras=("observation/exterior_image_1_left", "observation/wrist_image_left"),
        state=("observation/joint_position", "observation/gripper_position"),
        robot_dim=8,
    ),
    "LIBERO": _Robot(
        cameras=("observation/image", "observation/wrist_image"), state=("observation/state",), robot_dim=7
    ),
}


def read_observation(
    inputs: Inputs, options: PolicyOptions, media: MediaReader, settings: PolicySettings
) -> Observation:
    """Read the observation of a request.

    Raises:
        ClientError: an image or the state is missing or malformed, or there are too many.
    """
    files = inputs.files
    if any(one.modality == TENSOR for one in files):
        if len(files) != 1:
            raise ClientError(
                f"files: expected images, or one file of arrays alone, found {len(files)} files"
            )
        found = of_arrays(media.tensors(files[0]), options, settings)
    else:
        if len(files) > len(settings.cameras):
            raise ClientError(
                f"files: expected at most {len(settings.cameras)} images, of the cameras "
                f"{', '.join(settings.cameras)}, found {len(files)}",
                code="too_many_files",
            )
        images = [media.image(one) for one in files]
        found = Observation(images=images, state=_state([], options))
    return found


def of_arrays(arrays: Arrays, options: PolicyOptions, settings: PolicySettings) -> Observation:
    """The observation in a robot's arrays.

    Raises:
        ClientError: they are of no known robot, or one is malformed.
    """
    robots = {
        **_ROBOTS,
        "openpi": _Robot(
            cameras=tuple(f"image/{name}" for name in settings.cameras), state=("state",), masks="image_mask/"
        ),
        "lerobot": _Robot(
            cameras=tuple(f"{CAMERA}{name}" for name in settings.cameras), state=("observation.state",)
        ),
    }
    robot = next((one for one in robots.values() if one.cameras[0] in arrays), None)
    if robot is None:
        known = "; ".join(f"{', '.join((*one.cameras, *one.state))} ({name})" for name, one in robots.items())
        raise ClientError(
            f"the observation has no camera that is known: expected {known}; found {sorted(arrays)[:12]}",
            code="unknown_observation",
        )
    cameras = [name for name in robot.cameras if name in arrays and not _is_masked(arrays, robot, name)]
    if not cameras:
        raise ClientError(
            f"the observation has no image: expected one of {', '.join(robot.cameras)} that is not masked",
            code="unknown_observation",
        )
    return Observation(
        images=[image_of(name, arrays[name]) for name in cameras],
        state=_state([(name, arrays.get(name)) for name in robot.state], options),
        robot_dim=robot.robot_dim,
    )


def _is_masked(arrays: Arrays, robot: _Robot, camera: str) -> bool:
    """True for a camera whose image is a placeholder."""
    mask = arrays.get(f"{robot.masks}{camera.rpartition('/')[2]}") if robot.masks else None
    return mask is not None and not mask.all()


def _state(parts: Sequence[tuple[str, npt.NDArray[Any] | None]], options: PolicyOptions) -> Floats:
    """The state of the option, or of arrays, (n,)."""
    if options.robot_state is not None:
        found = np.asarray(options.robot_state, np.float32)
        names = "robot_state"
    else:
        names = " and ".join(name for name, _ in parts) or "robot_state"
        if not parts or any(value is None or value.dtype.kind not in "fiu" for _, value in parts):
            raise ClientError(
                f"{names}: expected the robot's state as numbers, found none",
                code="missing_required_parameter",
            )
        found = np.concatenate([np.asarray(value, np.float32).reshape(-1) for _, value in parts])
    if not np.isfinite(found).all():
        raise ClientError(f"{names}: expected finite numbers, found {found.tolist()[:16]}")
    return found
