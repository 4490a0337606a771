"""The CPU node of PaliGemma: images first, then one text; all tokens of a prompt with images see one another.

Its checkpoints have no chat template: a chat of one message is its images and its text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from models.base import MediaReader
from models.checkpoints.files import read_json_if_present
from models.decoder_lm.processing import TextFiles
from models.sequence_request import PromptPart
from models.text.chat_template import ChatTemplate, find_template
from models.text.tokenizer import load_tokenizer
from models.vision_language.chats import MediaChatPrompts
from models.vision_language.expansion import PlacedMedium, Seen
from models.vision_language.images import ImageAdapter
from models.vision_language.processing import VisionLanguageProcessing
from shared.events import Inputs, Media

IMAGE: Final = "<image>"
TEMPLATE: Final = (
    "{% if messages | length != 1 or messages[0]['role'] != 'user' %}"
    "{{ raise_exception('PaliGemma answers a single message of the user; it has no turns') }}{% endif %}"
    "{% set content = messages[0]['content'] %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content if part['type'] == 'image' %}{{ '" + IMAGE + "' }}{% endfor %}"
    "{% for part in content if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
)


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader | None) -> VisionLanguageProcessing:
    """Load the CPU nodes of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
        ChatTemplateError: a chat template is no valid Jinja.
    """
    tokenizer, names = load_tokenizer(checkpoint)
    prompts = MediaChatPrompts.read(checkpoint, names)
    if find_template(checkpoint, read_json_if_present(checkpoint / "tokenizer_config.json")) is None:
        prompts = MediaChatPrompts(ChatTemplate(TEMPLATE, names, origin=__name__), None)
    text = TextFiles.read(checkpoint, tokenizer, names, prompts)
    adapter = PaliGemmaAdapter(checkpoint, media, image_token=IMAGE)
    return PaliGemmaProcessing(text, adapter, bos_token=names.get("bos_token"), max_seq_len=max_seq_len)


class PaliGemmaAdapter(ImageAdapter):
    """Images of one size."""

    def see(self, medium: Media, options: Mapping[str, Any]) -> Seen:
        rows: int = self.images.image_seq_length
        return Seen(pixels=self.processed(medium)["pixel_values"][0], text=self.token * rows, rows=rows)


class PaliGemmaProcessing(VisionLanguageProcessing):
    """The CPU nodes of one checkpoint (`models.base.Processing`). Re-entrant."""

    def encode(self, request: Inputs, text: str) -> list[int]:
        bos, images = self._bos_token, text.rfind(IMAGE)
        if images < 0 or bos is None:
            return super().encode(request, text)
        if bos not in text:
            end = images + len(IMAGE)
            text = f"{text[:end]}{bos}{text[end:]}\n"
        return self._tokenizer.encode(text, add_special_tokens=False)

    def parts(self, ids: Sequence[int], media: Sequence[PlacedMedium]) -> list[PromptPart]:
        return [PromptPart(start=0, count=len(ids), full=True), *super().parts(ids, media)]
