"""The oracle of the families of the kit: transformers' own model, image processor and processor.

Pixtral's and InternVL's processors need torchvision, which is not installed, to be constructed. What they
write for an image is stated here for Pixtral, and called without the rest of the object for the others.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor

from models import registry
from models.base import CpuResult, Item
from models.vision_language.decoder import VlmDecoder
from models.vision_language.processing import VisionLanguageProcessing
from models.vision_language.tower import VisionEncoder
from shared.events import Media
from tests.tiny.vision import VISION_MODELS, VisionFamily, tiny_vision_checkpoint

Picture = npt.NDArray[np.uint8]


def picture(seed: int, height: int = 40, width: int = 60) -> Picture:
    """A picture of noise: what two towers make of two of them differs everywhere."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def medium_of(one: Picture) -> Media:
    """A medium whose digest is that of the picture's numbers and shape."""
    digest = hashlib.sha256(one.tobytes() + bytes(str(one.shape), "ascii")).hexdigest()
    return Media(modality="image", digest=digest)


class Pictures:
    """A reader of media that are arrays already."""

    def __init__(self) -> None:
        self._pictures: dict[str, Picture] = {}

    def add(self, one: Picture) -> Media:
        medium = medium_of(one)
        self._pictures[medium.digest] = one
        return medium

    def image(self, medium: Media) -> Picture:
        return self._pictures[medium.digest]


class _PixtralProcessor:
    @staticmethod
    def replace_image_token(of: Any, images: Mapping[str, Any], number: int) -> str:
        patch = of.patch_size * of.spatial_merge_size
        height, width = images["image_sizes"][number]
        row = "[IMG]" * (int(width) // patch)
        return "[IMG_BREAK]".join([row] * (int(height) // patch)) + "[IMG_END]"


_PROCESSORS: Final[Mapping[VisionFamily, tuple[Any, dict[str, Any]]]] = {
    "idefics3": (
        Idefics3Processor,
        {
            "image_token": "<image>",
            "image_seq_len": 4,
            "fake_image_token": "<fake_token_around_image>",
            "global_image_tag": "<global-img>",
        },
    ),
    "internvl": (
        InternVLProcessor,
        {
            "image_token": "<IMG_CONTEXT>",
            "image_seq_length": 4,
            "start_image_token": "<img>",
            "end_image_token": "</img>",
        },
    ),
    "llava": (
        LlavaProcessor,
        {
            "image_token": "<image>",
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    ),
    "mistral3": (_PixtralProcessor, {"image_token": "[IMG]", "patch_size": 8, "spatial_merge_size": 2}),
    "pixtral": (_PixtralProcessor, {"image_token": "[IMG]", "patch_size": 8, "spatial_merge_size": 1}),
}
FAMILIES: Final[tuple[VisionFamily, ...]] = tuple(_PROCESSORS)
_SETTINGS: Final[Mapping[VisionFamily, dict[str, Any]]] = {
    "idefics3": {"return_row_col_info": True},
    "internvl": {"crop_to_patches": True},
    "mistral3": {"patch_size": 16},
    "pixtral": {"patch_size": 8},
}


@dataclass(frozen=True)
class Reference:
    """A prompt as transformers prepares it: token ids, and the tensors that the model takes besides."""

    ids: list[int]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loaded:
    """A tiny checkpoint, loaded by us and by transformers."""

    family: VisionFamily
    nodes: ModuleType
    llm: VlmDecoder
    tower: VisionEncoder
    model: Any
    processing: VisionLanguageProcessing
    reader: Pictures

    def prepared(
        self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Picture] = (), **params: Any
    ) -> CpuResult:
        """The result of `prepare` for a chat with pictures, which its parts name by their number."""
        files = [msgspec.to_builtins(self.reader.add(one)) for one in pictures]
        args = {"inputs": {"messages": messages, "files": files}, "params": params}
        return self.processing.run("prepare", "k", {}, args)

    def reference(self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Picture]) -> Reference:
        """The prompt as transformers prepares it; the parts that are images name no file."""
        checkpoint = tiny_vision_checkpoint(self.family)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images: Mapping[str, Any] = {}
        if pictures:
            images = _images(self.family, pictures)
            processor, attributes = _PROCESSORS[self.family]
            first, *around = text.split(attributes["image_token"])
            of = SimpleNamespace(**attributes)
            text = first + "".join(
                processor.replace_image_token(of, images, number) + after
                for number, after in enumerate(around)
            )
        has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        ids = tokenizer(text, add_special_tokens=not has_bos)["input_ids"]
        tensors = {name: images[name] for name in images if name not in ("num_patches", "rows", "cols")}
        return Reference(ids, tensors)

    def generated(self, reference: Reference, tokens: int) -> list[int]:
        """The greedy tokens of `generate`."""
        ids = torch.tensor([reference.ids])
        found = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **reference.tensors,
        )
        answer: list[int] = found[0, ids.shape[1] :].tolist()
        return answer

    def continued(self, reference: Reference, begun: Sequence[int], *, tokens: int) -> list[int]:
        """The greedy tokens after a begun answer, whose own tokens are no places of images."""
        body, ids = self.model.model, torch.tensor([reference.ids])
        embed = self.model.get_input_embeddings()
        answer = [*begun]
        with torch.inference_mode():
            rows = torch.cat(list(body.get_image_features(**reference.tensors).pooler_output))
            prompt = embed(ids)
            mask = body.get_placeholder_mask(ids, inputs_embeds=prompt, image_features=rows)
            prompt = prompt.masked_scatter(mask, rows)
            for _ in range(tokens):
                whole = torch.cat([prompt, embed(torch.tensor([answer]))], dim=1)
                answer.append(int(self.model(inputs_embeds=whole).logits[0, -1].argmax()))
        return answer[len(begun) :]

    def rows(self, prepared: CpuResult) -> torch.Tensor:
        """The rows that our tower makes of the pixels of a prepared prompt."""
        pixels = torch.from_numpy(prepared.outputs["pixels"])
        (result,) = self.tower.run([Item(inputs={"pixels": pixels}, args=prepared.facts)])
        assert not isinstance(result, Exception)
        return result.outputs["embeds"]


def _images(family: VisionFamily, pictures: Sequence[Picture]) -> Mapping[str, Any]:
    processor = AutoImageProcessor.from_pretrained(tiny_vision_checkpoint(family), backend="pil")
    images: Any = [Image.fromarray(one) for one in pictures]
    found: Mapping[str, Any] = processor(
        images=[images] if family == "idefics3" else images, return_tensors="pt", **_SETTINGS.get(family, {})
    )
    return found


@cache
def loaded(family: VisionFamily) -> Loaded:
    """A tiny checkpoint, loaded once per session."""
    import transformers  # noqa: PLC0415 - its lazy module

    checkpoint = tiny_vision_checkpoint(family)
    name = registry.family_of(checkpoint)
    nodes, reader = registry.module(name, "nodes"), Pictures()
    model = getattr(transformers, VISION_MODELS[family].architecture).from_pretrained(checkpoint).eval()
    return Loaded(
        family,
        nodes,
        nodes.load(checkpoint, "llm"),
        nodes.load(checkpoint, "vision_encoder"),
        model,
        registry.module(name, "processing").load(checkpoint, max_seq_len=2048, media=reader),
        reader,
    )


def user(*content: str | int) -> dict[str, Any]:
    """A user's message: texts, and numbers of files that are images."""
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "file": part}
        for part in content
    ]
    return {"role": "user", "content": parts}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}
