"""The CPU nodes of robot policies.

prepare       images, state, instruction -> pixels (cameras, 3, H, W), token ids, the model's state
denormalize   actions (horizon, model's numbers) -> actions (horizon, robot's numbers), float32
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from models.base import CpuResult, MediaReader, TextlessProcessing
from models.checkpoints.files import CheckpointError
from models.checkpoints.hub_cache import snapshot
from models.robot_policy.graph import ACTIONS, PolicyOptions
from models.robot_policy.images import pixels_of
from models.robot_policy.normalization import Floats, Normalization
from models.robot_policy.observations import read_observation
from models.robot_policy.settings import PolicySettings
from models.robot_policy.weight_files import TOKENIZER
from models.text.tokenizer import PromptTokenizer, load_tokenizer
from shared.errors import ClientError
from shared.events import Inputs
from shared.tensors import Handle, inline_ids

Prompt = Callable[[str, Floats], str]
"""Makes the text of an instruction and a normalized state, (n,)."""


class PolicyProcessing(TextlessProcessing):
    """The CPU nodes of one checkpoint. Re-entrant.

    Args:
        prompt: the family's text.
        sends_state: the state goes to the KV node as numbers; otherwise it is in the text alone.
    """

    def __init__(
        self,
        settings: PolicySettings,
        normalization: Normalization,
        tokenizer: PromptTokenizer,
        media: MediaReader,
        *,
        prompt: Prompt,
        sends_state: bool,
    ) -> None:
        self._settings = settings
        self._normalization = normalization
        self._tokenizer = tokenizer
        self._media = media
        self._prompt = prompt
        self._sends_state = sends_state

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        return self._denormalized(inputs) if node == "denormalize" else self._prepared(key, args)

    def _prepared(self, key: str, args: Mapping[str, Any]) -> CpuResult:
        request, settings = msgspec.convert(args["inputs"], Inputs), self._settings
        options = msgspec.convert(args["options"], PolicyOptions)
        seen = read_observation(request, options, self._media, settings)
        if len(seen.state) > settings.state_dim:
            raise ClientError(
                f"robot_state: expected at most {settings.state_dim} numbers, found {len(seen.state)}"
            )
        state = self._normalization.normalized(seen.state)
        text = self._prompt(request.text or "", state)
        ids = self._tokenizer.encode(text, add_special_tokens=True, what="instruction and state")
        pixels = np.stack([pixels_of(one, settings.image_size) for one in seen.images])
        padded = np.zeros(settings.state_dim if self._sends_state else 0, np.float32)
        padded[: len(state)] = state[: len(padded)]
        robot_dim = min(seen.robot_dim or settings.robot_dim, settings.robot_dim)
        return CpuResult(
            facts={"prompt_tokens": len(ids), "cameras": len(pixels)},
            outputs={
                "pixels": pixels,
                "token_ids": inline_ids(f"{key}/token_ids", ids),
                "state": padded,
                "robot": inline_ids(f"{key}/robot", [robot_dim]),
            },
        )

    def _denormalized(self, inputs: Mapping[str, Handle]) -> CpuResult:
        found, robot = inputs[ACTIONS], inputs["robot"]
        actions = np.frombuffer(found.data or b"", np.float32).reshape(found.shape)
        [robot_dim] = np.frombuffer(robot.data or b"", np.int32).tolist()
        restored = self._normalization.restored(actions)
        return CpuResult(outputs={"action": np.ascontiguousarray(restored[:, :robot_dim])})


def load_processing(
    checkpoint: Path,
    media: MediaReader,
    *,
    max_seq_len: int,
    kwargs: Mapping[str, Any],
    prompt: Prompt,
    sends_state: bool,
    max_tokens: int,
    quantiles: bool,
) -> PolicyProcessing:
    """Load the CPU nodes of a checkpoint.

    Args:
        checkpoint: the folder.
        media: decodes the images and arrays of requests.
        max_seq_len: the deployment's.
        kwargs: the deployment's; `tokenizer` is a folder.
        prompt: the family's text.
        sends_state: the state goes to the KV node as numbers.
        max_tokens: the most tokens of a prompt, where the checkpoint does not say.
        quantiles: the family's normalization, where the checkpoint names none (`Normalization.read`).

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    settings = PolicySettings.read(checkpoint, max_tokens=max_tokens)
    tokenizer, _ = load_tokenizer(_tokenizer_folder(checkpoint, kwargs.get("tokenizer")))
    bounded = PromptTokenizer(
        tokenizer,
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        max_seq_len=min(settings.max_tokens, max_seq_len),
    )
    return PolicyProcessing(
        settings,
        Normalization.read(checkpoint, quantiles=quantiles),
        bounded,
        media,
        prompt=prompt,
        sends_state=sends_state,
    )


def _tokenizer_folder(checkpoint: Path, given: str | None) -> Path:
    """The folder with the tokenizer: the given one, the checkpoint, or the local cache of the hub."""
    if given is not None:
        return Path(given).expanduser()
    if (checkpoint / "tokenizer.json").is_file():
        return checkpoint
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - only for these checkpoints

    for cache in (*checkpoint.absolute().parents[2:3], Path(HF_HUB_CACHE)):
        if found := snapshot(cache, TOKENIZER):
            return found
    raise CheckpointError(
        f"{checkpoint} has no tokenizer.json, and {TOKENIZER} is not in the local cache of the hub: download "
        f"that repository's tokenizer (hf download {TOKENIZER} tokenizer.json), or set its folder in "
        "model_kwargs.tokenizer"
    )
