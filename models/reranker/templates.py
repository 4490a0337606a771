"""Prompts of rerankers whose folder has a chat template with the roles `query` and `document`. No torch.

The template is rendered as sentence-transformers does it; of a prompt that is too long, the end of the part
before the template's last words is cut.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from models.checkpoints.files import CheckpointError, read_json_if_present
from models.reranker.pairs import Limits, Pair, cut_text
from models.text.chat_template import ChatTemplate, ChatTemplateError, find_template
from models.text.embedding import modules_of
from shared.errors import ClientError

_MODULE: Final = "sentence_bert_config.json"
_QUERY: Final = "\N{OWL}query\N{OWL}"
_TEXT: Final = "\N{OWL}document\N{OWL}"
"""Texts that no template has, to find the places of query and text in the prompt."""


def is_rendered(checkpoint: Path) -> bool:
    """Return whether the pairs of a cross-encoder are rendered by a chat template.

    sentence-transformers does so if its own folder lists `message` among the inputs, and with another folder
    that has a template with both roles.
    """
    if modules_of(checkpoint):
        return "message" in (read_json_if_present(checkpoint / _MODULE).get("modality_config") or {})
    found = find_template(checkpoint, read_json_if_present(checkpoint / "tokenizer_config.json"))
    if found is None:
        return False
    try:
        template = ChatTemplate(found[0], {}, origin=found[1])
        given = _messages(_QUERY, _TEXT, "", is_structured=_is_structured(template, None))
        return _has_both(template.render(given))
    except ChatTemplateError:
        return False


class TemplatePrompts:
    """Makes prompts for one model. Re-entrant; `tokenizer` neither truncates nor pads.

    Args:
        is_structured: the template gets each text as a list with one part.
        adds_answer: the template is told to begin the answer (`add_generation_prompt`).
        instruction: the text of the role `system` where a request has none; empty: no such message.

    Raises:
        ChatTemplateError: the template does not render the roles, the text after the query.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        is_structured: bool,
        adds_answer: bool,
        instruction: str,
    ) -> None:
        self._tokenizer: Final = tokenizer
        self._template: Final = template
        self._is_structured: Final = is_structured
        self._adds_answer: Final = adds_answer
        self._instruction: Final = instruction
        rendered = self._render(_QUERY, _TEXT, instruction)
        behind = rendered.partition(_TEXT)[2]
        if not _has_both(rendered):
            raise ChatTemplateError("expected a chat template that renders the roles query and document")
        self._behind: Final[list[int]] = tokenizer.encode(behind, add_special_tokens=False).ids

    @classmethod
    def read(cls, checkpoint: Path, tokenizer: Tokenizer, names: dict[str, str]) -> "TemplatePrompts":
        """Read the template of a folder, and the settings that sentence-transformers has for it.

        Raises:
            CheckpointError: there is no template, or it does not render query and document.
        """
        found = find_template(checkpoint, read_json_if_present(checkpoint / "tokenizer_config.json"))
        settings = read_json_if_present(checkpoint / _MODULE)
        own = read_json_if_present(checkpoint / "config_sentence_transformers.json")
        default = (own.get("prompts") or {}).get(own.get("default_prompt_name"))
        message = (settings.get("modality_config") or {}).get("message") or {}
        given = (settings.get("processing_kwargs") or {}).get("chat_template") or {}
        try:
            if found is None:
                raise ChatTemplateError("expected a chat template, found none")
            template = ChatTemplate(found[0], names, origin=found[1])
            return cls(
                tokenizer,
                template,
                is_structured=_is_structured(template, message.get("format")),
                adds_answer=given.get("add_generation_prompt") is True,
                instruction=default or "",
            )
        except ChatTemplateError as error:
            raise CheckpointError(
                f"{checkpoint}: a reranker by its chat template needs one with the roles query and document: "
                f"{error}"
            ) from error

    def encode(
        self, queries: Sequence[str], texts: Sequence[str], limits: Limits, instruction: str | None
    ) -> list[Pair]:
        """Make the prompt of each text with its query.

        Raises:
            ClientError: a text is no valid Unicode, or the limit leaves no room for it.
        """
        if limits.tokens <= len(self._behind):
            raise ClientError(
                f"truncate_prompt_tokens: expected more than the {len(self._behind)} tokens behind the text, "
                f"found {limits.tokens}"
            )
        if limits.text_tokens is not None:
            texts = [cut_text(self._tokenizer, text, limits.text_tokens, limits.side) for text in texts]
        asked = self._instruction if instruction is None else instruction
        prompts = [self._render(query, text, asked) for query, text in zip(queries, texts, strict=True)]
        try:
            encodings = self._tokenizer.encode_batch_fast(prompts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise ClientError("texts: expected valid Unicode, found a lone surrogate") from error
        found = [self._cut(encoding.ids, limits) for encoding in encodings]
        return [Pair(ids, [0] * len(ids)) for ids in found]

    def _cut(self, ids: list[int], limits: Limits) -> list[int]:
        if len(ids) <= limits.tokens:
            return ids
        if limits.side == "left":
            return ids[-limits.tokens :]
        return [*ids[: limits.tokens - len(self._behind)], *self._behind]

    def _render(self, query: str, text: str, instruction: str) -> str:
        messages = _messages(query, text, instruction, is_structured=self._is_structured)
        return self._template.render(messages, add_generation_prompt=self._adds_answer)


def _messages(query: str, text: str, instruction: str, *, is_structured: bool) -> list[dict[str, Any]]:
    given = [("system", instruction)] if instruction else []
    given += [("query", query), ("document", text)]
    return [
        {"role": role, "content": [{"type": "text", "text": one}] if is_structured else one}
        for role, one in given
    ]


def _has_both(rendered: str) -> bool:
    """Return whether a prompt has the query and then the text."""
    return _QUERY in rendered.partition(_TEXT)[0] and _TEXT in rendered


def _is_structured(template: ChatTemplate, stated: str | None) -> bool:
    """Return whether a template expects lists of parts: as stated, else if it renders no plain texts."""
    if stated is not None:
        return stated == "structured"
    try:
        return not _has_both(template.render(_messages(_QUERY, _TEXT, "", is_structured=False)))
    except ChatTemplateError:
        return True
