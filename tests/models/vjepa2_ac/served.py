"""The nodes of the tiny checkpoint, and its KV node in an engine of its own."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from models.base import Item
from models.checkpoints.progress import silent
from models.vjepa2_ac import nodes
from tests.models.vjepa2_ac import cases
from tests.tiny.vjepa2_ac import tiny_vjepa2_ac
from tests.workers.kv_engine.engines import make_engine
from workers.data_plane.arrays import to_array, to_tensor
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.outputs import Output, ProgramOutput
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs

NODE: Final = "rollout_predictor"
PUBLISHED: Final = np.load(Path(__file__).with_name("published.npz"))


def load(node: str, *, extrinsics: bool = False) -> Any:
    folder = tiny_vjepa2_ac(extrinsics=extrinsics)
    return nodes.load(folder, node, kwargs={}, device="cpu", dtype="auto", progress=silent)


def is_close(found: Any, expected: npt.NDArray[np.float32]) -> bool:
    found = np.asarray(found)
    scale = np.abs(expected).max()
    return found.shape == expected.shape and bool(np.abs(found - expected).max() < 1e-4 * scale)


@cache
def frames() -> torch.Tensor:
    """The normalized latents of each frame of the clip, (8, 16, 48)."""
    item = Item(inputs={"pixels": torch.from_numpy(cases.clip())}, args={"each": True, "digests": ["frames"]})
    found: torch.Tensor = load("video_encoder").run([item])[0].outputs["frame"]
    return found


def controls(*, extrinsics: bool = False) -> torch.Tensor:
    """Of the recorded trajectory, (steps, 14 or 20)."""
    actions, states, cameras = cases.trajectory()
    return torch.from_numpy(np.concatenate([actions, states, *([cameras] if extrinsics else [])], axis=1))


def engine(node: Any = None, **settings: Any) -> KVEngine:
    sizes = {"num_blocks": 64, "block_size": 16, "max_step_tokens": 256, "max_sequences": 64}
    return make_engine(node or load(NODE), **{**sizes, **settings})


def steps(by: KVEngine) -> list[Output]:
    found: list[Output] = []
    while by.has_work:
        found += by.step()
    return found


class Rollout:
    """A rollout in an engine, one node call after the other, as the loop of the walk makes them."""

    def __init__(self, by: KVEngine, key: str, frame: torch.Tensor, of: torch.Tensor, horizon: int) -> None:
        self._by = by
        self._key = key
        self._begun = False
        self._inputs = {"frame": to_array(frame), "controls": to_array(of)}
        self._args = {"horizon": horizon}

    def call(self) -> None:
        if self._begun:
            self._by.continue_program(RunInputs(key=self._key, node=NODE, inputs=self._inputs))
        else:
            self._by.add_program(
                ProgramSpec(
                    key=self._key, node=NODE, program="rollout", inputs=self._inputs, args=self._args, seed=0
                )
            )
        self._begun = True

    def take(self, outputs: list[Output]) -> torch.Tensor:
        """The frame of this call, which is an input of the next one."""
        [output] = [one for one in outputs if one.key == self._key]
        assert isinstance(output, ProgramOutput)
        self._inputs = {**self._inputs, "frame": output.values["frame"]}
        return to_tensor(output.values["frame"], torch.device("cpu"))


def rolled(
    by: KVEngine, trajectories: Mapping[str, tuple[torch.Tensor, torch.Tensor]], horizon: int
) -> dict[str, torch.Tensor]:
    """The frames of several rollouts at once, by name: (horizon, patches, width)."""
    runs = {name: Rollout(by, name, frame, of, horizon) for name, (frame, of) in trajectories.items()}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in runs}
    for _ in range(horizon):
        for run in runs.values():
            run.call()
        outputs = steps(by)
        for name, run in runs.items():
            found[name].append(run.take(outputs))
    return {name: torch.cat(one) for name, one in found.items()}
