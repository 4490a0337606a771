"""Decoder-only language models: the CPU face.

`prepare` turns a request as the client meant it (messages, text, or token ids) into token ids, and its
parameters into effective ones: the request's over the checkpoint's `generation_config.json` over plain
defaults. Bad words become the tokens that spell them. For an echo it says the prompt's text, too, and for a
chat with tools what its answer has to be. It reads the checkpoint's tokenizer files with `tokenizers` and
`jinja2` alone: no torch.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from tokenizers import AddedToken, Tokenizer

from models.base import EMBEDDING, HIDDEN_STATES, OF_PROMPTS, CpuResult, TextDecoder
from models.checkpoints.files import CheckpointError, read_json
from models.sequence_request import PoolingParams, PreparedPrompt, PrepareRequest, SamplingParams
from models.text import embedding
from models.text.chat_template import TOOL_USE, ChatTemplate, find_template
from models.text.detokenizer import TextDecoders
from models.text.embedding import Embedding
from models.text.guides import CompiledGuide, Guides, InvalidGuideError
from models.text.tool_calls import CallFormat, format_in, guide_for, offered
from shared.errors import BugError, ClientError
from shared.events import Guide, Inputs, Params
from shared.tensors import Handle, inline_ids
from shared.validation_errors import misfit

_LOGGER: Final = logging.getLogger(__name__)

MAX_STATES_BYTES: Final = 16 << 20
"""The hidden states of a prompt go through the log, as everything that is put out does."""
_NFC_JOINS: Final = 4
"""How many characters at most become one where a text is composed (NFC)."""
_SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_DEFAULTS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words",
}
"""Settings of `generation_config.json` that are applied, and what they are called here."""
_IGNORED_DEFAULTS: Final = {
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "num_beams": 1,
    "min_length": 0,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
"""Settings of `generation_config.json` that would change the answer and are not applied; with what is off."""


def load(checkpoint: Path, *, max_seq_len: int) -> "DecoderLmProcessing":
    """Read the tokenizer, the chat template and the defaults of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
        ChatTemplateError: the chat template is no valid Jinja.
    """
    config = _read_json_if_there(checkpoint / "tokenizer_config.json")
    tokenizer, names = load_tokenizer(checkpoint)
    found = find_template(checkpoint, config)
    template = ChatTemplate(found[0], names, origin=found[1]) if found else None
    found = find_template(checkpoint, config, TOOL_USE)
    tool_template = ChatTemplate(found[0], names, origin=found[1]) if found else template
    written = _calls_in(tool_template)
    return DecoderLmProcessing(
        tokenizer=tokenizer if written is None else _saying(tokenizer, written.opens),
        template=template,
        tool_template=tool_template,
        defaults=_generation_defaults(checkpoint),
        eos_ids=_eos_ids(checkpoint, tokenizer, names.get("eos_token")),
        vocab_size=vocab_size_of(checkpoint, tokenizer),
        max_seq_len=max_seq_len,
        embedding=embedding.read(checkpoint),
        is_guided=True,
    )


class ToolsNotSupportedError(ClientError):
    """The checkpoint has no way to be told of tools, or none whose answers can be read."""

    code = "tools_not_supported"

    def __init__(self, why: str) -> None:
        super().__init__(f"tools: {why}; ask without tools, or serve a checkpoint that was made for them")


class DecoderLmProcessing:
    """The loaded CPU face (`models.base.Processing`). Re-entrant.

    Attributes:
        eos_ids: the tokens that end an answer.
        tool_calls: how calls of tools are written; empty where the template of chats with tools, which is
            `tool_template`, knows none, or asks for them in a way that is not known here.

    Args:
        is_guided: whether its answers can be guided, if the tokenizer allows it.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None = None,
        defaults: Params,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        max_seq_len: int,
        embedding: Embedding | None = None,
        is_guided: bool = False,
    ) -> None:
        self.eos_ids = eos_ids
        self._tokenizer = tokenizer
        self._template = template
        self._tool_template = tool_template
        self._calls = _calls_in(tool_template)
        self.tool_calls = self._calls.name if self._calls is not None else ""
        self._defaults = defaults
        self._vocab_size = vocab_size
        self._max_seq_len = max_seq_len
        self._embedding = embedding or Embedding()
        self._decoders = TextDecoders(tokenizer)
        self._longest_token = _longest_token(tokenizer)
        # Now, and not when it is asked for: it keeps the interpreter for a second, and others' tokens wait.
        self._guides = self._make_guides() if is_guided else None

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node != "prepare":
            raise BugError(f"decoder_lm has no CPU node {node!r}; it has 'prepare'")
        asked = PrepareRequest.of(args)
        request, params = asked.inputs, asked.params
        _check_modalities(request, params)
        params = self._with_tools(request, params)
        text = self._text(request)
        is_rendered = request.messages is not None or request.chat
        if text is not None:
            self._check_size(text)
        ids = (
            request.token_ids or [] if text is None else self.encode(text, add_special_tokens=not is_rendered)
        )
        pooling = self._pooling(request, params)
        try:
            return self.prepared(
                key, ids, params, text=text, pooling=pooling, guide=params.guide if request.tools else UNSET
            )
        except InvalidGuideError as error:
            if offered(request) is None:
                raise
            raise InvalidGuideError(error.what, kind="tools") from error

    def prepared(
        self,
        key: str,
        ids: list[int],
        params: Params,
        *,
        text: str | None = None,
        pooling: PoolingParams | None = None,
        guide: Guide | UnsetType | None = UNSET,
    ) -> CpuResult:
        """The result of `prepare` for a prompt of these tokens.

        Args:
            key: prefix of the keys of the outputs.
            ids: the prompt.
            params: the request's parameters.
            text: the prompt's text, if it is known.
            pooling: for a request without an answer: an embedding, or hidden states.
            guide: the guide that a chat with tools leads to.

        Raises:
            ClientError: the prompt is empty or too long, or a token id is outside the vocabulary.
        """
        is_answered = params.max_tokens != 0 and not params.warm and pooling is None
        self._check(ids, new_tokens=1 if is_answered else 0)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if params.guide is not None:
            self._check_guide(params.guide, params.stop_token_ids)
        if pooling is not None and pooling.mode == "none":
            _check_states(len(ids), self._embedding.size)
        facts = PreparedPrompt(
            prompt_tokens=len(ids),
            sampling=self.effective_sampling(params),
            prompt_text=(text if text is not None else self._decode(ids)) if params.echo else None,
            pooling=pooling,
            guide=guide,
        )
        return CpuResult(
            facts=msgspec.to_builtins(facts), outputs={"token_ids": inline_ids(f"{key}/token_ids", ids)}
        )

    def _pooling(self, request: Inputs, params: Params) -> PoolingParams | None:
        if EMBEDDING in request.output_modalities:
            return self._embedding.asked(params.dimensions)
        return PoolingParams(mode="none") if HIDDEN_STATES in request.output_modalities else None

    def text_decoder(self) -> TextDecoder:
        return self._decoders.new()

    def compiled(self, guide: Guide) -> CompiledGuide:
        """A guide that `prepare` let pass, ready to be followed."""
        if self._guides is None:
            raise BugError("a guide was let pass, but answers of this model cannot be guided")
        return self._guides.compiled(guide)

    def encode(self, text: str, *, add_special_tokens: bool, what: str = "the prompt") -> list[int]:
        """The tokens of a text; `what` it is, for whoever is told that it is none.

        Raises:
            ClientError: it is no valid Unicode.
        """
        # `encode` holds the GIL (1.9 s for 2.4 MB, and the engine stands still); the batch call does not.
        try:
            [encoded] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise ClientError(f"{what} is no valid Unicode text: it holds a lone surrogate") from error
        ids: list[int] = encoded.ids
        return ids

    def effective_sampling(self, params: Params) -> SamplingParams:
        """The sampling parameters of a request: its own over the checkpoint's over temperature 1, all tokens.

        Parameters other than temperature, top-p and top-k are absent where they have no effect.

        Raises:
            ClientError: a token id is outside the vocabulary, or a bad word has no token.
        """

        def chosen(name: str, default: Any) -> Any:
            found = (getattr(params, name), getattr(self._defaults, name), default)
            return next(value for value in found if value is not None)

        biases = [(int(id), bias) for id, bias in params.logit_bias.items()]
        self._check_ids("logit_bias", [id for id, _ in biases])
        repetition_penalty = chosen("repetition_penalty", 1.0)
        return SamplingParams(
            temperature=chosen("temperature", 1.0),
            top_p=chosen("top_p", 1.0),
            top_k=max(chosen("top_k", 0), 0),
            min_p=chosen("min_p", 0.0) or None,
            repetition_penalty=None if repetition_penalty == 1 else repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=biases,
            bad_words=self._spellings(chosen("bad_words", [])),
            min_tokens=chosen("min_tokens", 0) or None,
        )

    def _make_guides(self) -> Guides | None:
        spelling = self._decoders.spelling(self._vocab_size)
        if spelling is None:
            return None
        marks = sorted(id for id in self._decoders.marks if id < self._vocab_size)
        return Guides(spelling.tokens, marks, drops_space=spelling.drops_space)

    def _check_guide(self, guide: Guide, stop_token_ids: Sequence[int]) -> None:
        if self._guides is None:
            raise ClientError(
                "guide: answers of this model cannot be guided: its texts are not its tokens' in a row",
                code="not_supported",
            )
        if not self.eos_ids and not stop_token_ids:
            raise ClientError(
                "guide: this model has no token that ends an answer: name one in stop_token_ids",
                code="not_supported",
            )
        self._guides.check(guide)

    def _spellings(self, words: Iterable[str | list[int]]) -> list[list[int]]:
        """The tokens of each word, as it is written and with a space before it."""
        spellings: list[list[int]] = []
        for number, word in enumerate(words):
            where = f"bad_words[{number}]"
            if isinstance(word, str):
                found = [
                    self.encode(text, add_special_tokens=False, what=where) for text in (word, f" {word}")
                ]
                if not all(found):
                    raise ClientError(f"{where}: expected a text that has a token, found {word!r:.80}")
            else:
                self._check_ids(where, word)
                found = [word]
            spellings += [ids for ids in found if ids not in spellings]
        return spellings

    def _with_tools(self, request: Inputs, params: Params) -> Params:
        """The parameters, with a guide for the calls that are asked for."""
        if offered(request) is None:
            return params
        if self._tool_template is None or not self._tool_template.knows_tools:
            raise ToolsNotSupportedError("this model's chat template knows no tools")
        if self._calls is None:
            raise ToolsNotSupportedError(
                "the way this model's chat template has it write calls is not known here"
            )
        return msgspec.structs.replace(params, guide=guide_for(self._calls, request, params.guide))

    def _text(self, request: Inputs) -> str | None:
        """The prompt's text; None where it is tokens already."""
        if request.token_ids is not None:
            return None
        if request.messages is None and not request.chat:
            return request.text
        messages = request.messages
        if messages is None:
            messages = [{"role": "user", "content": request.text or ""}]
        return self._render(messages, offered(request))

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
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
        plain = [_plain_message(place, message) for place, message in enumerate(messages)]
        if any("tool_calls" in message for message in plain) and "tool_calls" not in template.source:
            raise ToolsNotSupportedError("this model's chat template knows no tool_calls of messages")
        return template.render(plain, tools)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _check_size(self, text: str) -> None:
        """Refuse what cannot fit before it is made tokens: of 8 MB that takes 15 s, and others wait."""
        if self._longest_token is None:
            return
        least = -(-len(text) // self._longest_token)
        if least > self._max_seq_len:
            raise ClientError(
                f"the model's context length is {self._max_seq_len} tokens, but the prompt alone has "
                f"at least {least}; shorten it",
                code="context_length_exceeded",
            )

    def _check(self, ids: list[int], *, new_tokens: int) -> None:
        if not ids:
            raise ClientError("the prompt is empty: expected at least one token")
        if len(ids) + new_tokens > self._max_seq_len:
            raise ClientError(
                f"the model's context length is {self._max_seq_len} tokens, but the prompt alone has "
                f"{len(ids)}; shorten it",
                code="context_length_exceeded",
            )
        self._check_ids("the prompt", ids)

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = next(id for id in ids if not 0 <= id < self._vocab_size)
            raise ClientError(
                f"{what}: token id {wrong} is outside the model's vocabulary of {self._vocab_size}",
                code="invalid_token_id",
            )


def _check_modalities(request: Inputs, params: Params) -> None:
    if request.files or set(request.input_modalities) - {"text"}:
        found = [medium.modality for medium in request.files] or request.input_modalities
        raise ClientError(f"this model reads text only; found {found}", code="unsupported_modality")
    asked = set(request.output_modalities)
    if asked not in ({"text"}, {EMBEDDING}, {HIDDEN_STATES}, set()):
        raise ClientError(
            "this model writes a text, makes an embedding, or puts out hidden states; asked for "
            f"{request.output_modalities}",
            code="unsupported_modality",
        )
    if EMBEDDING not in asked and params.dimensions is not None:
        raise ClientError("dimensions: expected none where no embedding is asked for")
    if asked & OF_PROMPTS and (request.tools or params.warm or params.echo or params.logprobs is not None):
        raise ClientError(
            f"expected no tools, warm, echo or logprobs beside {', '.join(asked)}, which is no answer"
        )


def _check_states(tokens: int, size: int) -> None:
    """See that a log can take all of a prompt's hidden states; `size` is that of one.

    Raises:
        ClientError: it cannot.
    """
    most = MAX_STATES_BYTES // (4 * max(1, size))
    if tokens > most:
        raise ClientError(
            f"hidden_states: expected at most {most} tokens, whose states are {MAX_STATES_BYTES >> 20} MiB, "
            f"found {tokens}; send the prompt in parts, or ask for an embedding",
            code="hidden_states_too_large",
            status=413,
        )


# ---- messages ------------------------------------------------------------------------------------


def _plain_message(place: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: `content` is one string, and a call's arguments are no string."""
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise ClientError(f"messages[{place}].tool_calls: expected a list, found {type(calls).__name__}")
        where = f"messages[{place}].tool_calls"
        message = {**message, "tool_calls": [_plain_call(f"{where}[{n}]", c) for n, c in enumerate(calls)]}
    elif "tool_calls" in message:
        message = {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(message.get("role"), str):
        raise ClientError(f"messages[{place}]: expected a string in 'role', found {message.get('role')!r}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        if content is None and not message.get("tool_calls"):
            raise ClientError(f"messages[{place}]: expected text in 'content', found none")
        return message
    if not isinstance(content, list):
        raise ClientError(
            f"messages[{place}].content: expected a string or a list of parts, found {type(content).__name__}"
        )
    parts = [
        _text_of_part(f"messages[{place}].content[{number}]", part) for number, part in enumerate(content)
    ]
    return {**message, "content": "".join(parts)}


def _plain_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise ClientError(
            f"{where}: expected a call such as {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ClientError(f"{where}.function.arguments: expected JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ClientError(
            f"{where}.function.arguments: expected a JSON object, found {type(arguments).__name__}"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _text_of_part(where: str, part: object) -> str:
    if not isinstance(part, dict):
        raise ClientError(f"{where}: expected a part such as {{'type': 'text', 'text': ...}}")
    if part.get("type") != "text":
        raise ClientError(
            f"{where}: this model reads text only; found a part of type {part.get('type')!r}",
            code="unsupported_modality",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise ClientError(f"{where}: expected a string in 'text', found {type(text).__name__}")
    return text


# ---- the checkpoint's files ----------------------------------------------------------------------


def load_tokenizer(checkpoint: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a checkpoint, and its named special tokens (`bos_token` and so on) as text.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    config = _read_json_if_there(checkpoint / "tokenizer_config.json")
    tokenizer = _read_tokenizer(checkpoint)
    names = _special_tokens(_read_json_if_there(checkpoint / "special_tokens_map.json") | config)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in names.values()]
    )
    return tokenizer, names


def _calls_in(template: ChatTemplate | None) -> CallFormat | None:
    return format_in(template.source) if template is not None and template.knows_tools else None


def _saying(tokenizer: Tokenizer, text: str) -> Tokenizer:
    """The tokenizer, with a token that is part of what is said though it is a special one."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not any(token.special and token.content == text for token in added):
        return tokenizer
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["special"] and token["content"] != text
    return Tokenizer.from_str(json.dumps(state))


def _longest_token(tokenizer: Tokenizer) -> int | None:
    """How many bytes, and so characters at most, one token stands for; None where there is no such bound.

    There is one where each byte of a text is in a token as it came: in BPE over bytes, whose tokens are
    written with a character for each byte, without a normalizer that drops some.
    """
    state = json.loads(tokenizer.to_str())
    splits = state.get("pre_tokenizer") or {}
    parts = splits.get("pretokenizers", [splits])
    added = tokenizer.get_added_tokens_decoder().values()
    if (
        state["model"].get("type") != "BPE"
        or (state.get("normalizer") or {"type": "NFC"})["type"] != "NFC"
        or not any(part.get("type") == "ByteLevel" for part in parts)
        or any(part.get("behavior") == "Removed" for part in parts)
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))
    return longest if state.get("normalizer") is None else longest * _NFC_JOINS


def _read_tokenizer(checkpoint: Path) -> Tokenizer:
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint} has no tokenizer.json; make one with "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens, as text."""
    found = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _generation_defaults(checkpoint: Path) -> Params:
    """What `generation_config.json` says of sampling."""
    path = checkpoint / "generation_config.json"
    config = _read_json_if_there(path)
    for name, off in _IGNORED_DEFAULTS.items():
        if config.get(name, off) not in (off, None):
            _LOGGER.warning("%s asks for %s=%r, which is not applied", path, name, config[name])
    wanted = {ours: config[name] for name, ours in _DEFAULTS.items() if config.get(name) is not None}
    if config.get("do_sample") is False:
        wanted["temperature"] = 0.0
    try:
        return msgspec.convert(wanted, Params)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {misfit(error, wanted, Params).message}") from error


def _eos_ids(checkpoint: Path, tokenizer: Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """The tokens that end an answer: of the generation config, else the model's, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        found = _read_json_if_there(checkpoint / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if found is not None:
            if not all(isinstance(id, int) for id in ids):
                raise CheckpointError(
                    f"{checkpoint / name}: expected an integer or integers in eos_token_id, found {found!r}"
                )
            return tuple(ids)
    own = tokenizer.token_to_id(eos_token) if eos_token is not None else None
    return () if own is None else (own,)


def vocab_size_of(checkpoint: Path, tokenizer: Tokenizer) -> int:
    """How many rows the embedding has: the model's `vocab_size`, which may exceed the tokenizer's."""
    found = _read_json_if_there(checkpoint / "config.json").get("vocab_size")
    return found if isinstance(found, int) else int(tokenizer.get_vocab_size(with_added_tokens=True))


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
