"""The stateless nodes: the encoder, the predictor of all frames at once, and the scores of candidates."""

from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch

from models.base import Item, StatelessResult
from models.encoder_cache import EncoderCache
from models.vjepa2_ac.predictor import AcPredictor, normalized

_TOKENS_AT_ONCE: Final = 32_768
"""The most tokens of candidates in one forward."""


class Encoder:
    """`pixels` (frames, 3, H, W) -> `encoder_hidden` (1, latents, width) of a clip, and `frame`.

    With the argument `each`, every frame is a clip that stands still, and `frame` has the normalized latents
    of each, (frames, patches, width).
    """

    max_batch, max_cost = 8, 1 << 24

    def __init__(self, model: Any, tubelet: int) -> None:
        self._model = model
        self._tubelet = tubelet
        self.encoder_cache: Final = EncoderCache()

    def group(self, item: Item) -> Hashable:
        return item.args["each"], tuple(item.inputs["pixels"].shape)

    def cost(self, item: Item) -> float:
        return item.inputs["pixels"].numel()

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        each: bool = items[0].args["each"]

        def encode(new: Sequence[int]) -> Sequence[torch.Tensor]:
            clips = torch.stack([items[index].inputs["pixels"] for index in new])
            return [*(self._frames(clips) if each else self._latents(clips)[:, None])]

        keys = [self._key(item) for item in items]
        name = "frame" if each else "encoder_hidden"
        return [StatelessResult(outputs={name: one}) for one in self.encoder_cache.fill(keys, encode)]

    def _key(self, item: Item) -> Hashable:
        """Names the frames of an item: of 9 chosen ones 8 are encoded, and these are not 8 chosen ones."""
        return tuple(item.args["digests"]), item.args.get("num_frames"), self.group(item)

    def _latents(self, clips: torch.Tensor) -> torch.Tensor:
        """(n, frames, 3, H, W) -> (n, latents, width) float32."""
        found: torch.Tensor = self._model(clips).last_hidden_state.float()
        return found

    def _frames(self, clips: torch.Tensor) -> torch.Tensor:
        """(n, frames, 3, H, W) -> (n, frames, patches, width) float32."""
        still = clips.flatten(0, 1)[:, None].repeat(1, self._tubelet, 1, 1, 1)
        return torch.unflatten(normalized(self._latents(still)), 0, clips.shape[:2])


class Predictor:
    """`encoder_hidden`, `controls` (candidates, frames, 14 or 20) -> `predicted_hidden`.

    The latents behind each frame, (candidates, latents, width) float32: one forward under the mask of frames.
    """

    max_batch = 4

    def __init__(self, network: AcPredictor) -> None:
        self._network = network

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        return [StatelessResult(outputs={"predicted_hidden": self._predicted(item)}) for item in items]

    def _predicted(self, item: Item) -> torch.Tensor:
        settings = self._network.settings
        frames = torch.unflatten(item.inputs["encoder_hidden"], 1, (-1, settings.patches))
        at_once = max(1, _TOKENS_AT_ONCE // (frames.shape[1] * settings.frame_tokens))
        found = [
            self._network(frames.expand(len(some), -1, -1, -1), some).flatten(1, 2)
            for some in torch.split(item.inputs["controls"], at_once)
        ]
        return torch.cat(found)


class Scorer:
    """`predicted_hidden`, `goal_hidden` (1, latents, width) -> costs: the mean absolute differences.

    `costs` (candidates,) float32, `best_index` () int64: the candidate with the least cost, and
    `predicted_hidden`.
    """

    max_batch = 8

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        found: list[StatelessResult | Exception] = []
        for item in items:
            predicted = item.inputs["predicted_hidden"]
            costs = (predicted - item.inputs["goal_hidden"]).abs().flatten(1).mean(dim=-1)
            outputs = {"best_index": costs.argmin(), "costs": costs, "predicted_hidden": predicted}
            found.append(StatelessResult(outputs=outputs))
        return found
