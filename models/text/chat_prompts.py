"""Prompts of chats: rendered by a checkpoint's chat templates, with the tools that a request offers."""

from pathlib import Path
from typing import Any, Final, Self

import msgspec

from models.checkpoints.files import read_json_if_present
from models.sequence_request import PromptReasoning
from models.text import reasoning
from models.text.chat_template import TOOL_USE, ChatTemplate, ChatTemplateError, find_template
from models.text.messages import flatten_messages
from models.text.reasoning import ReasoningFormat
from models.text.tool_calls import CallFormat, format_in, guide_for, offered
from shared.errors import ClientError
from shared.events import Guide, GuideReasoning, Inputs, Params

_ANY_TEXT: Final = r"start: /(.|\n)*/"


class ToolsNotSupportedError(ClientError):
    """The checkpoint's chat template takes no tools, or writes calls in an unknown format."""

    code = "tools_not_supported"

    def __init__(self, why: str) -> None:
        super().__init__(f"tools: {why}; ask without tools, or serve a checkpoint that was made for them")


class ChatPrompts:
    """Renders the prompts of one checkpoint. Re-entrant.

    Attributes:
        calls: the format of tool calls in answers; None if the template takes no tools, or asks for calls in
            a format that is unknown.
        reasoning: the format of reasoning in answers; None if the model does not think.
    """

    def __init__(self, template: ChatTemplate | None, tool_template: ChatTemplate | None) -> None:
        self._template = template
        self._tool_template = tool_template
        knows_tools = tool_template is not None and tool_template.knows_tools
        self.calls: Final[CallFormat | None] = (
            format_in(tool_template.source) if tool_template is not None and knows_tools else None
        )
        self.reasoning: Final[ReasoningFormat | None] = (
            None if template is None else reasoning.format_in(template.source)
        )

    @classmethod
    def read(cls, checkpoint: Path, special_tokens: dict[str, str]) -> Self:
        """Read the chat templates of a checkpoint, if it has some.

        Raises:
            ChatTemplateError: a template is no valid Jinja.
        """
        config = read_json_if_present(checkpoint / "tokenizer_config.json")
        found = find_template(checkpoint, config)
        template = ChatTemplate(found[0], special_tokens, origin=found[1]) if found else None
        found = find_template(checkpoint, config, TOOL_USE)
        tool_template = ChatTemplate(found[0], special_tokens, origin=found[1]) if found else template
        return cls(template, tool_template)

    def text_of(self, request: Inputs) -> str | None:
        """The text of a request's prompt; None if it consists of token ids.

        Raises:
            ClientError: the messages are malformed, or the checkpoint has no template for them.
        """
        if request.token_ids is not None:
            return None
        if request.messages is None and not request.chat:
            return request.text
        messages = request.messages
        if messages is None:
            messages = [{"role": "user", "content": request.text or ""}]
        return self._render(messages, offered(request), request)

    def reasoning_of(self, request: Inputs, text: str | None) -> PromptReasoning | None:
        """The reasoning that the answer to a chat may begin with; `text` is its prompt."""
        if self.reasoning is None or text is None or (request.messages is None and not request.chat):
            return None
        is_inside = reasoning.begins_inside(self.reasoning, text)
        if request.continue_final_message and not is_inside:  # what follows is more reasoning, or content
            is_inside = reasoning.is_begun(self.reasoning, _text_of(request.messages)) or None
        return None if is_inside is None else PromptReasoning(self.reasoning.name, is_inside=is_inside)

    def with_reasoning(self, request: Inputs, params: Params, found: PromptReasoning | None) -> Params:
        """The parameters, with a guide that leaves the reasoning free, up to its limit.

        Raises:
            ClientError: a limit is given, and the model does not think.
        """
        if params.thinking_budget is not None and request.messages is None and not request.chat:
            raise ClientError("thinking_budget: expected a chat, found a raw prompt", code="not_supported")
        if self.reasoning is None:
            if params.thinking_budget is not None:
                raise ClientError(
                    "thinking_budget: expected none, this model does not think", code="not_supported"
                )
            return params
        options = frozenset[str]() if self._template is None else self._template.options
        budget = reasoning.budget_of(params.thinking_budget, request.reasoning_effort, options)
        if found is None or (budget is None and params.guide is None):
            return params
        answer = self.reasoning.answer if offered(request) is None else ""
        free = GuideReasoning(
            opens=self.reasoning.opens,
            closes=self.reasoning.closes + self.reasoning.behind + answer,
            is_open=found.is_inside,
            max_tokens=budget,
        )
        guide = params.guide or Guide(grammar=_ANY_TEXT)
        return msgspec.structs.replace(params, guide=msgspec.structs.replace(guide, reasoning=free))

    def with_tools(self, request: Inputs, params: Params) -> Params:
        """The parameters, with a guide for the tool calls that the request asks for.

        Raises:
            ClientError: the checkpoint supports no tools, or they cannot be combined with the guide.
        """
        if offered(request) is None:
            return params
        if self._tool_template is None or not self._tool_template.knows_tools:
            raise ToolsNotSupportedError("this model's chat template takes no tools")
        if self.calls is None:
            raise ToolsNotSupportedError("the format of tool calls in this model's chat template is unknown")
        return msgspec.structs.replace(params, guide=guide_for(self.calls, request, params.guide))

    def plain(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages in the form that the template takes.

        Raises:
            ClientError: a message is malformed, or has a part that the model cannot read.
        """
        return flatten_messages(messages)

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, request: Inputs
    ) -> str:
        template = self._template if tools is None else self._tool_template
        if template is None:
            raise ClientError(
                "this model has no chat template, so it cannot take messages: send a raw prompt instead "
                "(POST /v1/completions, or /generate with chat=false), or serve it with a "
                "chat_template.jinja in its checkpoint folder",
                code="no_chat_template",
                status=422,
            )
        if not messages:
            raise ClientError("messages is empty: expected at least one message")
        plain = self.plain(messages)
        if self.reasoning is not None and self.reasoning.message_key:
            plain = [_with_thoughts(message, self.reasoning.message_key) for message in plain]
        if any("tool_calls" in message for message in plain) and "tool_calls" not in template.source:
            raise ToolsNotSupportedError("this model's chat template takes no tool_calls in messages")
        try:
            options = reasoning.template_options(
                request.template_options,
                request.reasoning_effort,
                template.options,
                can_think=self.reasoning is not None,
            )
        except ValueError as error:
            raise ClientError(str(error), code="not_supported") from error
        ends = {
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
        }
        try:
            return template.render(plain, tools, options, **ends)
        except ChatTemplateError:
            if all(message.get("content") is not None for message in plain):
                raise
        # Some templates test whether a message has a content, others read it: Qwen3's first one.
        whole = [message | {"content": message.get("content") or ""} for message in plain]
        return template.render(whole, tools, options, **ends)


def _text_of(messages: list[dict[str, Any]] | None) -> str:
    """The text of the last message."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if isinstance(part, dict))


def _with_thoughts(message: dict[str, Any], key: str) -> dict[str, Any]:
    """An earlier answer with its reasoning under `key`, with what it said before a call.

    gpt-oss's template takes one or the other of an answer with calls.
    """
    thought = message.get("reasoning_content") or message.get("reasoning")
    if message.get("role") != "assistant" or not isinstance(thought, str) or key in message:
        return message
    said = message.get("content") if message.get("tool_calls") else None
    if said and isinstance(said, str):
        return {**message, "content": "", key: f"{thought}\n\n{said}"}
    return {**message, key: thought}
