"""The texts that policies are trained with: an instruction, and for Pi0.5 the state as numbers. No torch."""

from typing import Final

import numpy as np

from models.robot_policy.normalization import Floats

BINS: Final = 256


def instruction_prompt(instruction: str, state: Floats) -> str:
    """Pi0's prompt: the instruction and a line break. The state is no part of the text."""
    return f"{_cleaned(instruction)}\n"


def state_prompt(instruction: str, state: Floats) -> str:
    """Pi0.5's prompt: the instruction, and the number of the bin of each value of the state.

    The bins divide -1 to 1 into 256; values below are -1, those above 255 (openpi, `PaligemmaTokenizer`).
    """
    return f"Task: {_cleaned(instruction)}, State: {' '.join(map(str, bins_of(state)))};\nAction: "


def bins_of(state: Floats) -> list[int]:
    """The bin of each normalized value of a state, (n,): -1 to 255."""
    edges = np.linspace(-1, 1, BINS + 1)[:-1]
    return [int(one) for one in np.digitize(state, edges) - 1]


def _cleaned(instruction: str) -> str:
    return instruction.strip().replace("_", " ").replace("\n", " ")
