"""The inputs of a request: a chat, a text or token ids, media files, and the tools that a model may call."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from shared.events.json_values import check_json_values

MAX_SCHEMA_DEPTH: Final = 64
"""The maximum nesting depth of a JSON schema, in a tool or in a guide."""
MAX_TOOLS: Final = 128
"""The maximum number of tools in a request."""
MAX_TOOLS_BYTES: Final = 131_072
"""The maximum size of all tools of a request together, as MessagePack."""
MAX_TEXTS: Final = 10_000
"""The maximum number of texts, and of queries, in a request."""
DIGEST_PATTERN: Final = r"\A(?:[0-9a-f]{64})?\Z"


class Media(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A media file of a request, named by its digest; its bytes are in the media store (`shared.media`).

    Attributes:
        modality: `image`, `audio`, `video` or `tensor`.
        digest: the SHA-256 of the bytes, 64 hex digits; empty only in events of earlier versions.
        size: the number of bytes.
        content_type: the MIME type, found in the content.
        name: the file's name, for messages; None if it has none.
        data: of earlier versions, and refused at admission: an event carries no bytes.
        ref: of earlier versions, and refused at admission.
    """

    modality: str
    digest: Annotated[str, Meta(pattern=DIGEST_PATTERN)] = ""
    size: Annotated[int, Meta(ge=0)] = 0
    content_type: Annotated[str, Meta(max_length=128)] = ""
    data: bytes | None = None
    ref: str | None = None
    name: str | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A function that the model may ask the client to call.

    Attributes:
        description: a description of the function, for the model.
        parameters: the JSON schema of an object; None declares a function without parameters.
        strict: enforce that the arguments match the schema, also if the model chose to call the function.
    """

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.strict is False:  # equal requests have equal digests: False means the same as None
            msgspec.structs.force_setattr(self, "strict", None)
        if self.parameters is None:
            return
        kind = self.parameters.get("type", "object")
        if kind != "object":
            raise ValueError(f"parameters: expected a schema of the type 'object', found {kind!r:.80}")
        try:
            check_json_values([self.parameters], MAX_SCHEMA_DEPTH)
        except ValueError as error:
            raise ValueError(f"parameters: {error}") from error


class Tool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tool in OpenAI's format."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A reference to one of the request's functions."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A `tool_choice` that names one tool, in OpenAI's format."""

    type: Literal["function"]
    function: FunctionName


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How much a model is to think, in OpenAI's words."""
MAX_TEMPLATE_BYTES: Final = 65_536
"""The maximum size of the further variables of a chat template, as MessagePack."""
PROMPTS: Final = ("messages", "text", "token_ids", "texts")
"""The fields of which a request has exactly one."""
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Texts = Annotated[list[str | Annotated[list[_TokenId], Meta(min_length=1)]], Meta(max_length=MAX_TEXTS)]


class Inputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The inputs of a request: one of `messages`, `text`, `token_ids` and `texts`, and optional media.

    Attributes:
        messages: a chat in OpenAI's format, rendered with the checkpoint's chat template.
        text: one user message; with `chat` false, a raw prompt.
        texts: several texts, or token ids of texts, each with a result of its own. Files beside them are
            further inputs with results of their own, after those of the texts; with files there may be no
            text. For models with `takes_texts` only.
        queries: what the texts and files are compared with: one query for all of them, or one for each.
        chat: render `text` with the chat template.
        files: media, stored before the request is published. A part `{"type": "image", "file": 0}` of a
            message places one, by its index; with `text`, all of them come before it, in order. With
            `texts`, see there.
        tools: functions that the model may call. The chat template renders them.
        tool_choice: `auto` lets the model decide. `none` hides the tools from the model. `required` makes it
            call at least one function; a named tool makes it call that function once.
        parallel_tool_calls: allow more than one call. The output is text, with the calls in the model's own
            format (`models.text.tool_calls`).
        template_options: further variables of the chat template, such as `enable_thinking`.
        reasoning_effort: how much a model that thinks is to think; `none` is not at all. None is its default.
        continue_final_message: the last message is the beginning of the answer. The prompt ends with its
            text, and the answer is what follows.
        add_generation_prompt: the prompt ends with the beginning of the assistant's turn, as it does unless
            the final message is continued.
    """

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: list[_TokenId] | None = None
    texts: _Texts | None = None
    queries: _Texts = []
    chat: bool = True
    files: list[Media] = []
    input_modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])
    output_modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    template_options: dict[str, Any] = {}
    reasoning_effort: Effort | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    def __post_init__(self) -> None:
        given = [n for n in PROMPTS if getattr(self, n) is not None]
        if len(given) != 1:
            found = ", ".join(given) if given else "none of them"
            raise ValueError(f"expected one of {', '.join(PROMPTS)}; found {found}")
        if self.queries and self.texts is None:
            raise ValueError("queries: expected none without texts, which they are compared with")
        if self.tools:
            self._check_tools()
        elif self.tool_choice not in ("auto", "none"):
            raise ValueError("tool_choice: expected 'auto' or 'none', because the request has no tools")
        if self.template_options or self.reasoning_effort is not None:
            self._check_template()
        if self.continue_final_message:
            self._check_final_message()
        if not self.add_generation_prompt and not self._is_rendered:
            raise ValueError("add_generation_prompt: expected true for a raw prompt, found false")

    @property
    def _is_rendered(self) -> bool:
        """True for a chat, which a template renders."""
        return self.token_ids is None and self.texts is None and self.chat

    def _check_final_message(self) -> None:
        last = self.messages[-1] if self.messages else {}
        found = "a last message with tool calls" if last.get("tool_calls") else f"{last.get('role')!r:.80}"
        if last.get("role") != "assistant" or last.get("tool_calls") or not last.get("content"):
            raise ValueError(
                "continue_final_message: expected a chat whose last message is the assistant's, with a text; "
                f"found {found if last else 'none'}"
            )

    def _check_template(self) -> None:
        if not self._is_rendered:
            name = "template_options" if self.template_options else "reasoning_effort"
            raise ValueError(f"{name}: expected a chat, whose template takes it; found a raw prompt")
        try:
            check_json_values([self.template_options], MAX_SCHEMA_DEPTH)
            size = len(msgspec.msgpack.encode(self.template_options))
        except UnicodeEncodeError as error:
            raise ValueError("template_options: expected valid Unicode, found a lone surrogate") from error
        except ValueError as error:
            raise ValueError(f"template_options: {error}") from error
        if size > MAX_TEMPLATE_BYTES:
            raise ValueError(f"template_options: expected at most {MAX_TEMPLATE_BYTES} bytes, found {size}")

    def _check_tools(self) -> None:
        if not self._is_rendered:
            raise ValueError("tools: expected a chat, whose template renders the tools; found a raw prompt")
        names = [tool.function.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tools: expected each function once, found {name!r} twice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(
                f"tool_choice: expected one of the functions {', '.join(names)[:400]}, "
                f"found {self.tool_choice.function.name!r:.80}"
            )
        try:
            size = len(msgspec.msgpack.encode(self.tools))
        except UnicodeEncodeError as error:
            raise ValueError("tools: expected valid Unicode, found a lone surrogate") from error
        if size > MAX_TOOLS_BYTES:
            raise ValueError(f"tools: expected at most {MAX_TOOLS_BYTES} bytes, found {size}")
