"""The text encoder of a pipeline: what its own `__call__` asks `encode_prompt` for, recorded.

The call runs as far as its latents. So the class itself decides which prompts are encoded, and how: with
guidance or without, once or twice, cut to which length. The denoiser's run gets the same results back.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from PIL import Image

from models.base import Item, StatelessResult
from models.diffusion_pipelines.calls import call_arguments, needs_picture
from models.diffusion_pipelines.lora import Adapters
from models.diffusion_pipelines.packing import build, flatten, json_tensor, json_value, pack, unpack
from models.diffusion_pipelines.proxies import pipeline_of_run
from models.encoder_cache import EncoderCache
from shared.errors import ClientError

CONDITION = "condition"
_STRUCTURE = "structure"
_AFTER_PROMPTS = ("prepare_latents", "encode_image", "prepare_image_latents")
"""The methods that a class calls next when all of its prompts are encoded."""


class _Encoded(Exception):  # noqa: N818 - the normal end of a call
    """The pipeline has encoded its prompts."""


class TextEncoder:
    """prompt -> `condition`, packed. Prompts are kept by their text and the arguments of the call.

    Args:
        pipeline: with its text encoders and tokenizers; its other components are descriptions. None: a class
            whose denoiser reads the text itself.
    """

    max_batch = 8

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._adapters = Adapters(pipeline, text=True, denoiser=False)
        self.encoder_cache = EncoderCache()

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        keys = [_key(item) for item in items]

        def encode(new: Sequence[int]) -> list[torch.Tensor]:
            return [self._encoded(items[index]) for index in new]

        return [StatelessResult(outputs={CONDITION: one}) for one in self.encoder_cache.fill(keys, encode)]

    def _encoded(self, item: Item) -> torch.Tensor:
        results = self._recorded(item) if self._pipeline is not None else []
        tensors: dict[str, torch.Tensor] = {}
        structure = flatten(results, "prompt", tensors)
        return pack({_STRUCTURE: json_tensor(structure), **tensors})

    def _recorded(self, item: Item) -> list[Any]:
        results: list[Any] = []
        own: Any = None

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            results.append(type(own).encode_prompt(own, *args, **kwargs))
            return results[-1]

        def stop(*_: Any, **__: Any) -> Any:
            raise _Encoded

        ends = dict.fromkeys(_AFTER_PROMPTS, stop)
        own = pipeline_of_run(self._pipeline, {"encode_prompt": encode_prompt, **ends})
        arguments = call_arguments(item, type(own)) | _blank(item, type(own))
        self._adapters.use(item.args.get("lora"))
        try:
            own(**arguments)
        except _Encoded:
            return results
        except ValueError as error:
            raise ClientError(f"the model does not take these arguments: {error}") from error
        raise RuntimeError(f"{type(own).__name__} has made no latents: it cannot be served in parts")


def _blank(item: Item, pipeline_class: type[Any]) -> dict[str, Any]:
    """A blank picture for a class that asks for one: the text does not depend on it."""
    if not needs_picture(pipeline_class):
        return {"image": None} if "image" in call_arguments(item, pipeline_class) else {}
    size = (item.args["call"].get("width") or 8, item.args["call"].get("height") or 8)
    return {"image": Image.new("RGB", size)}


def _key(item: Item) -> bytes:
    """The arguments that a condition depends on. Further ones do no harm: they cost a hit in the cache."""
    asked = {name: item.args.get(name) for name in ("prompt", "negative_prompt", "call", "lora")}
    return msgspec.json.encode(asked, order="sorted")


def recorded_results(condition: torch.Tensor, device: torch.device) -> list[Any]:
    """The results of `encode_prompt`, in the order of the calls.

    Args:
        condition: the output of the text encoder.
        device: of the results.

    Raises:
        ValueError: it is no condition.
    """
    found = unpack(condition, device)
    results: list[Any] = build(json_value(found.pop(_STRUCTURE)), found)
    return results
