"""Policies over `tests.models.plain_cells`, one request at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from models.base import Item
from models.programs import Driver, Mask, Pass
from models.robot_policy.flow import ActionFlow, PolicyNode
from models.robot_policy.tower import CameraEncoder
from tests.models.plain_cells import PlainCells, alone

__all__ = ["alone", "driver", "load", "run"]


def run(
    node: PolicyNode,
    driver: Driver,
    *,
    mask: Mask | None = None,
    shift: int = 0,
    timed: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> torch.Tensor:
    """The actions of a driver.

    Args:
        node: the KV node with its expert.
        driver: a run of the program.
        mask: in place of the driver's masks.
        shift: of the positions of the expert.
        timed: measures the time of the prefix, of the state, and of the steps, by these names.
    """

    def changed(asked: Pass, following: int) -> Pass:
        assert asked.positions is None, "they continue after the committed tokens"
        first = following + (shift if asked.tower else 0)
        positions = torch.arange(first, first + asked.tokens)
        return replace(asked, mask=mask or asked.mask, positions=positions)

    return PlainCells(node, changed=changed, timed=timed, named=_part_of).run(driver)["actions"]


def _part_of(asked: Pass) -> str:
    return "actions" if not asked.commits else "state" if asked.tower else "prefix"


def load(
    family: ModuleType, folder: Path, *, dtype: str = "auto", **kwargs: Any
) -> tuple[CameraEncoder, PolicyNode]:
    """The torch nodes of a checkpoint; `kwargs` are the deployment's."""

    def of(node: str) -> Any:
        return family.load(folder, node, dtype=dtype, progress=lambda *_: None, kwargs=kwargs)

    return of("vit_encoder"), of("LLM")


def driver(
    encoder: CameraEncoder, node: PolicyNode, *, pixels: Any, ids: list[int], state: Any, noise: torch.Tensor
) -> ActionFlow:
    """A run of the program `actions` with a given noise."""
    [found] = encoder.run([Item(inputs={"pixels": torch.as_tensor(np.asarray(pixels))}, args={})])
    assert not isinstance(found, Exception)
    return ActionFlow(
        node,
        node.expert,
        rows=found.outputs["rows"],
        token_ids=torch.tensor(ids),
        state=torch.as_tensor(np.asarray(state)),
        noise=noise,
        steps=node.expert.settings.steps,
    )
