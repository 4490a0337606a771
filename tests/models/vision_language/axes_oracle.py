"""The oracle of Qwen's, Gemma's and PaliGemma's models: transformers' own model and image processor.

Its video processors need torchvision, which is not installed. The frames of a video are normalised by its
image processor here, and cut into patches as its video processors cut them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from models import registry
from models.base import CpuResult, Item
from models.media.kinds import ChooseFrames, Video, VideoInfo
from models.sequence_request import PromptPart
from models.vision_language.decoder import VlmDecoder
from models.vision_language.processing import VisionLanguageProcessing
from models.vision_language.tower import VisionEncoder
from shared.events import Media
from shared.tensors import read_ids
from tests.models.vision_language.oracle import Picture
from tests.tiny.vision_axes import AXES_MODELS, AxesFamily, tiny_axes_checkpoint
from workers.data_plane.arrays import to_array
from workers.kv_engine.sequence_spec import SequenceSpec

IMAGE: Final = 3
"""The dimensions of an image; a video has one more."""
FPS: Final = 4.0
"""The frames per second of all videos."""


class Shelf:
    """A reader of media that are arrays already: images, and videos."""

    def __init__(self) -> None:
        self._media: dict[str, Picture] = {}

    def put(self, one: Picture) -> dict[str, Any]:
        """Keep a medium; it as a file of a request."""
        digest = hashlib.sha256(one.tobytes()).hexdigest()
        self._media[digest] = one
        return {"modality": "image" if one.ndim == IMAGE else "video", "digest": digest}

    def image(self, medium: Media) -> Picture:
        return self._media[medium.digest]

    def video(self, medium: Media, *, choose: ChooseFrames) -> Video:
        frames = self._media[medium.digest]
        count, height, width, _ = frames.shape
        info = VideoInfo(frames=count, fps=FPS, seconds=count / FPS, width=width, height=height)
        indices = tuple(choose(info))
        return Video(
            frames=frames[list(indices)], seconds=np.array(indices) / FPS, indices=indices, info=info
        )


@dataclass(frozen=True)
class Reference:
    """A prompt as transformers prepares it: token ids, and what the model takes besides."""

    ids: list[int]
    given: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """A tiny checkpoint, loaded by us and by transformers."""

    family: AxesFamily
    llm: VlmDecoder
    tower: VisionEncoder
    model: Any
    processing: VisionLanguageProcessing
    shelf: Shelf

    def prepared(
        self, messages: Sequence[Mapping[str, Any]], media: Sequence[Picture], **options: Any
    ) -> CpuResult:
        """The result of `prepare` for a chat with media, which its parts name by their number."""
        files = [self.shelf.put(one) for one in media]
        asked = {"inputs": {"messages": messages, "files": files}, "params": {"options": options}}
        return self.processing.run("prepare", "k", {}, asked)

    def rows(self, prepared: CpuResult) -> torch.Tensor:
        """The rows that our tower makes of the pixels of a prepared prompt."""
        pixels = torch.from_numpy(prepared.outputs["pixels"])
        (result,) = self.tower.run([Item(inputs={"pixels": pixels}, args=prepared.facts)])
        assert not isinstance(result, Exception), result
        return result.outputs["embeds"]

    def spec(
        self, key: str, messages: Sequence[Mapping[str, Any]], media: Sequence[Picture], **more: Any
    ) -> SequenceSpec:
        """A chat as the walk of a plan starts it."""
        prepared = self.prepared(messages, media)
        prompt_ids = read_ids(prepared.handle("token_ids"))
        if not media:
            return SequenceSpec(key=key, prompt_ids=prompt_ids, **more)
        parts = msgspec.convert(prepared.facts["parts"], list[PromptPart])
        rows = to_array(self.rows(prepared))
        return SequenceSpec(key=key, prompt_ids=prompt_ids, parts=parts, embeds=rows, **more)

    def reference(
        self, messages: Sequence[Mapping[str, Any]], media: Sequence[Picture], indices: Sequence[int] = ()
    ) -> Reference:
        """The prompt as transformers prepares it. `indices`: the frames taken of every video."""
        tokenizer = AutoTokenizer.from_pretrained(tiny_axes_checkpoint(self.family))
        images = _images(self.family, [one for one in media if one.ndim == IMAGE])
        if self.family.startswith("paligemma"):
            return _of_paligemma(tokenizer, messages, images)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if self.family == "gemma3":
            return _of_gemma3(tokenizer, text, images)
        return _of_qwen(
            self.family, tokenizer, text, images, [one for one in media if one.ndim != IMAGE], indices
        )

    def generated(self, reference: Reference, tokens: int) -> list[int]:
        """The greedy tokens of `generate`."""
        if self.family == "paligemma" and not reference.given:
            # With torch's attention and without an image, it leaves out the mask, and then all is seen.
            self.model.set_attn_implementation("eager")
        ids = torch.tensor([reference.ids])
        found = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **reference.given,
        )
        answer: list[int] = found[0, ids.shape[1] :].tolist()
        return answer


@cache
def served(family: AxesFamily) -> Served:
    """A tiny checkpoint, loaded once per session."""
    import transformers  # noqa: PLC0415 - its lazy module

    checkpoint = tiny_axes_checkpoint(family)
    name, shelf = registry.family_of(checkpoint), Shelf()
    nodes = registry.module(name, "nodes")
    return Served(
        family,
        nodes.load(checkpoint, "llm"),
        nodes.load(checkpoint, "vision_encoder"),
        getattr(transformers, AXES_MODELS[family].architecture).from_pretrained(checkpoint).eval(),
        registry.module(name, "processing").load(checkpoint, max_seq_len=2048, media=shelf),
        shelf,
    )


def _images(family: AxesFamily, pictures: Sequence[Picture], **settings: Any) -> Mapping[str, Any]:
    if not pictures:
        return {}
    processor = AutoImageProcessor.from_pretrained(tiny_axes_checkpoint(family), backend="pil")
    found: Mapping[str, Any] = processor(
        images=[Image.fromarray(one) for one in pictures], return_tensors="pt", **settings
    )
    return found


def _of_paligemma(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], images: Mapping[str, Any]
) -> Reference:
    text = "".join(part["text"] for part in messages[0]["content"] if part["type"] == "text")
    if not images:
        return Reference(tokenizer(text)["input_ids"])
    seen = "<image>" * (16 * len(images["pixel_values"]))
    ids = tokenizer(f"{seen}<bos>{text}\n", add_special_tokens=False)["input_ids"]
    kinds = torch.zeros(1, len(ids), dtype=torch.int64)
    return Reference(ids, {"pixel_values": images["pixel_values"], "token_type_ids": kinds})


def _of_gemma3(tokenizer: Any, text: str, images: Mapping[str, Any]) -> Reference:
    if images:
        soft = "<image_soft_token>" * 16
        of = SimpleNamespace(full_image_sequence=f"\n\n<start_of_image>{soft}<end_of_image>\n\n")
        first, *around = text.split("<start_of_image>")
        text = first + "".join(
            Gemma3Processor.replace_image_token(of, images, number) + after
            for number, after in enumerate(around)
        )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not images:
        return Reference(ids)
    kinds = (torch.tensor([ids]) == tokenizer.convert_tokens_to_ids("<image_soft_token>")).int()
    return Reference(ids, {"pixel_values": images["pixel_values"], "token_type_ids": kinds})


def _of_qwen(
    family: AxesFamily,
    tokenizer: Any,
    text: str,
    images: Mapping[str, Any],
    videos: Sequence[Picture],
    indices: Sequence[int],
) -> Reference:
    cells = AutoImageProcessor.from_pretrained(tiny_axes_checkpoint(family), backend="pil")
    clips = [planes_of(cells, video[list(indices)], family) for video in videos]
    facts = [
        SimpleNamespace(frames_indices=list(indices), fps=FPS, sampled_fps=len(indices) / len(one) * FPS)
        for one in videos
    ]
    processor = Qwen3VLProcessor if family.startswith("qwen3") else Qwen2_5_VLProcessor
    of = SimpleNamespace(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        image_processor=cells,
        video_processor=cells,
    )
    of._calculate_timestamps = lambda *args: Qwen3VLProcessor._calculate_timestamps(of, *args)
    given: dict[str, Any] = dict(images)
    if videos:
        given["pixel_values_videos"] = torch.cat([pixels for pixels, _ in clips])
        given["video_grid_thw"] = torch.tensor([grid for _, grid in clips])
        given["second_per_grid_ts"] = torch.tensor([2 / one.sampled_fps for one in facts])
    texts = {
        of.image_token: [
            processor.replace_image_token(of, images, number)
            for number in range(len(images["image_grid_thw"]) if images else 0)
        ],
        of.video_token: [
            processor.replace_video_token(of, {**given, "video_metadata": facts}, number)
            for number in range(len(videos))
        ],
    }
    places = {token: iter(found) for token, found in texts.items()}
    ids = tokenizer("".join(next(places.get(one, iter([one])), one) for one in _split(text, places)))[
        "input_ids"
    ]
    kinds = torch.zeros(1, len(ids), dtype=torch.int32)
    for kind, token in enumerate(texts, start=1):
        kinds[0, torch.tensor(ids) == tokenizer.convert_tokens_to_ids(token)] = kind
    if given:
        given["mm_token_type_ids"] = kinds
    if family != "qwen2_5_vl":
        given.pop("second_per_grid_ts", None)
    return Reference(ids, given)


def _split(text: str, tokens: Mapping[str, Any]) -> list[str]:
    pieces = [text]
    for token in tokens:
        pieces = [
            one
            for piece in pieces
            for number, part in enumerate(piece.split(token))
            for one in ((token, part) if number else (part,))
        ]
    return pieces


def planes_of(cells: Any, frames: Picture, family: AxesFamily) -> tuple[torch.Tensor, list[int]]:
    """A video's patches and grid, as transformers' video processors cut normalised frames."""
    patch = cells.patch_size
    height, width = frame_size(family, frames)
    small = [
        np.asarray(Image.fromarray(one).resize((width, height), Image.Resampling.BICUBIC)) for one in frames
    ]
    pixels = np.stack(small).transpose(0, 3, 1, 2) * cells.rescale_factor
    mean, std = (np.array(one)[None, :, None, None] for one in (cells.image_mean, cells.image_std))
    video = torch.from_numpy((pixels - mean) / std).float()
    if len(video) % 2:
        video = torch.cat([video, video[-1:]])
    planes, rows, columns = len(video) // 2, height // patch, width // patch
    cut = video.view(1, planes, 2, 3, rows // 2, 2, patch, columns // 2, 2, patch)
    cut = cut.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    return cut.reshape(planes * rows * columns, -1), [planes, rows, columns]


def frame_size(family: AxesFamily, frames: Picture) -> tuple[int, int]:
    """The size of a video's frames after resizing, for the videos of these tests: 2 to 6 cells."""
    cell = 32 if family.startswith("qwen3") else 28
    return (cell * 2, cell * 2) if frames.shape[1] == frames.shape[2] else (cell, cell * 2)
