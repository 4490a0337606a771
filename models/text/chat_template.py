"""Chat templates of checkpoints: render messages to one prompt string.

A template is Jinja source that comes with the checkpoint. It runs in Jinja's immutable sandbox, with limits
(`models.text.bounded_jinja`), on plain data: the messages, the special tokens and a few helpers. The result
equals that of `apply_chat_template` of transformers (tested against it), which is not imported: that takes
four seconds and torch.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from models.checkpoints.files import read_json_if_present
from models.text.bounded_jinja import BoundedEnvironment
from shared.errors import ClientError


class ChatTemplateError(ClientError):
    """The template is invalid, or refuses these messages, which are well formed."""

    code = "chat_template_error"
    status = 422


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's text for training; renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled chat template. Rendering is re-entrant.

    Args:
        special_tokens: `bos_token`, `eos_token` and so on, as the template may name them.
        origin: the file of the source, for error messages.

    Attributes:
        knows_tools: the template uses the variable `tools`.
        options: the further variables that it uses, by which it can be asked for another prompt.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str) -> None:
        self.source = source
        self._environment = environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            used = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template of {origin} is no valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.knows_tools = "tools" in used
        self.options = frozenset(used - _OWN - environment.globals.keys() - special_tokens.keys())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt for `messages` and `tools`, by default up to the start of the assistant's answer.

        `options` are values of the variables in `ChatTemplate.options`. With `continue_final_message` the
        prompt ends with the text of the last message.

        Raises:
            ChatTemplateError: the template refuses these messages.
        """
        if continue_final_message:
            messages, add_generation_prompt = [*messages[:-1], _marked(messages[-1])], False
        try:
            with self._environment.bounded():
                text: str = self._template.render(
                    messages=[_without_nulls(message) for message in messages],
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **{**(options or {}), **self._special_tokens},
                )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            # Templates are programs: on unexpected data they fail with any of these.
            raise ChatTemplateError(
                f"the model's chat template cannot render these messages: {type(error).__name__}: {error}"
            ) from error
        return _up_to_mark(text) if continue_final_message else text


_OWN: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""The variables that every template gets."""
TOOL_USE: Final = "tool_use"
"""The name of a separate template for chats with tools."""


def find_template(
    checkpoint: Path, tokenizer_config: Mapping[str, Any], name: str = "default"
) -> tuple[str, str] | None:
    """The source of a checkpoint's template of that name, and its file; None if there is none.

    `chat_template.jinja` has precedence, with further templates in `additional_chat_templates`; then
    `chat_template.json`. Otherwise `tokenizer_config.json` holds either the `default` template or a list of
    named ones.
    """
    path = checkpoint / "chat_template.jinja"
    if name != "default":
        path = checkpoint / "additional_chat_templates" / f"{name}.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    if name == "default":  # older processors of images have a file of their own
        own = read_json_if_present(checkpoint / "chat_template.json").get("chat_template")
        if isinstance(own, str):
            return own, str(checkpoint / "chat_template.json")
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, dict)]
        found = {entry.get("name"): entry.get("template") for entry in named}
    if isinstance(found, dict):
        found = found.get(name)
    elif name != "default":
        return None
    return (found, str(checkpoint / "tokenizer_config.json")) if isinstance(found, str) else None


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without null values: clients write `"tool_calls": null`, templates test for the key."""
    return {key: value for key, value in message.items() if value is not None}


_MARK: Final = "[the answer goes on here]"
"""Stands behind the text of a message that is continued; what the template writes behind it is cut off."""


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the mark, and a space that tells whether the template strips texts."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": f"{content}{_MARK} "}
    parts = list(content or ())
    last = max((n for n, part in enumerate(parts) if "text" in part), default=None)
    if last is None:
        raise ChatTemplateError("continue_final_message: expected a last message with a text, found none")
    parts[last] = {**parts[last], "text": f"{parts[last]['text']}{_MARK} "}
    return {**message, "content": parts}


def _up_to_mark(text: str) -> str:
    before, mark, behind = text.rpartition(_MARK)
    if not mark:
        raise ChatTemplateError(
            "continue_final_message: the model's chat template does not write the text of the last message, "
            "so it cannot be continued"
        )
    return before if behind.startswith(" ") else before.rstrip()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON. Jinja's own `tojson` escapes for HTML, which prompts are not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
