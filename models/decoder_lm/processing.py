"""The CPU node `prepare` of decoder-only language models.

It turns a request as the client wrote it (messages, text or token ids) into token ids, and its parameters
into effective ones: the request's over the checkpoint's `generation_config.json` over plain defaults. For an
echo it reports the prompt's text, and for a chat with tools the guide of the answer. It reads the
checkpoint's tokenizer files with `tokenizers` and `jinja2` alone: no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from msgspec import UNSET
from tokenizers import Tokenizer

from models.base import EMBEDDING, HIDDEN_STATES, OF_PROMPTS, CpuResult, TextDecoder
from models.checkpoints.files import read_json_if_present
from models.sequence_request import PoolingParams, PrepareRequest
from models.text import embedding
from models.text.chat_prompts import ChatPrompts
from models.text.detokenizer import DetokenizerFactory
from models.text.embedding import Embedding
from models.text.guides import GuideCompiler, guide_compiler_of
from models.text.prepared_prompt import prepare_prompt
from models.text.sampling_defaults import generation_defaults
from models.text.tokenizer import (
    PromptTokenizer,
    eos_ids_of,
    load_tokenizer,
    vocab_size_of,
    with_visible_tokens,
)
from models.text.tool_calls import offered
from models.text.truncation import Truncation
from shared.errors import BugError, ClientError
from shared.events import Guide, Inputs, Params
from shared.tensors import Handle

MAX_STATES_BYTES: Final = 16 << 20
"""The most bytes of hidden states of one prompt: like all outputs they are written to the log."""


def load(checkpoint: Path, *, max_seq_len: int) -> "DecoderLmProcessing":
    """Load the tokenizer, the chat templates and the defaults of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
        ChatTemplateError: a chat template is no valid Jinja.
    """
    tokenizer, names = load_tokenizer(checkpoint)
    text = TextFiles.read(checkpoint, tokenizer, names, ChatPrompts.read(checkpoint, names))
    return DecoderLmProcessing(text, max_seq_len=max_seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """The facts about a language model in the small files of its checkpoint."""

    tokenizer: Tokenizer
    prompts: ChatPrompts
    defaults: Params
    eos_ids: tuple[int, ...]
    vocab_size: int
    embedding: Embedding
    truncation_side: str = "right"

    @classmethod
    def read(
        cls, checkpoint: Path, tokenizer: Tokenizer, names: Mapping[str, str], prompts: ChatPrompts
    ) -> Self:
        """Read the files besides the tokenizer, whose named special tokens are `names`, and the templates.

        Raises:
            CheckpointError: a file is malformed.
        """
        visible = [] if prompts.calls is None else [*prompts.calls.visible]
        if prompts.reasoning is not None:
            visible += prompts.reasoning.visible
        tokenizer = with_visible_tokens(tokenizer, visible)
        return cls(
            tokenizer=tokenizer,
            prompts=prompts,
            defaults=generation_defaults(checkpoint),
            eos_ids=eos_ids_of(checkpoint, tokenizer, names.get("eos_token")),
            vocab_size=vocab_size_of(checkpoint, tokenizer),
            embedding=embedding.read(checkpoint),
            truncation_side=str(
                read_json_if_present(checkpoint / "tokenizer_config.json").get("truncation_side", "right")
            ),
        )


class DecoderLmProcessing:
    """The CPU nodes of one checkpoint (`models.base.Processing`). Re-entrant."""

    def __init__(self, text: TextFiles, *, max_seq_len: int) -> None:
        self.eos_ids = text.eos_ids
        self.tool_calls = text.prompts.calls.name if text.prompts.calls is not None else ""
        self.reasoning = text.prompts.reasoning.name if text.prompts.reasoning is not None else ""
        self._tokenizer = PromptTokenizer(text.tokenizer, vocab_size=text.vocab_size, max_seq_len=max_seq_len)
        self._max_seq_len = max_seq_len
        self._truncation_side = text.truncation_side
        self._prompts = text.prompts
        self._defaults = text.defaults
        self._embedding = text.embedding
        self._decoders = DetokenizerFactory(text.tokenizer)
        # Built at load: it holds the GIL for a second, which would delay the tokens of other requests.
        self._guides: GuideCompiler | None = guide_compiler_of(self._decoders, text.vocab_size)

    def run(self, node: str, key: str, inputs: Mapping[str, Handle], args: Mapping[str, Any]) -> CpuResult:
        if node != "prepare":
            raise BugError(f"decoder_lm has no CPU node {node!r}; it has 'prepare'")
        prepare = PrepareRequest.of(args)
        request = prepare.inputs
        check_inputs(request)
        text = self._prompts.text_of(request)
        ids = self._ids(prepare, text)
        is_cut = self._truncation(prepare) is not None and prepare.params.echo
        return self.prepared(key, prepare, ids, self._tokenizer.decode(ids) if is_cut else text)

    def prepared(self, key: str, prepare: PrepareRequest, ids: list[int], text: str | None) -> CpuResult:
        """The result for a prompt of token ids, whose text is `text`; None if the client sent ids.

        Raises:
            ClientError: the prompt is empty or too long, or a parameter is invalid for this model.
        """
        request = prepare.inputs
        _check_outputs(request, prepare.params)
        reasoning = self._prompts.reasoning_of(request, text)
        params = self._prompts.with_tools(request, prepare.params)
        params = self._prompts.with_reasoning(request, params, reasoning)
        return prepare_prompt(
            key,
            ids,
            params,
            tokenizer=self._tokenizer,
            defaults=self._defaults,
            check_guide=self._check_guide,
            text=text,
            pooling=self._pooling(request, params, len(ids)),
            guide=UNSET if params.guide == prepare.params.guide and not request.tools else params.guide,
            guide_param="" if offered(request) is None else "tools",
            reasoning=reasoning,
        )

    def text_decoder(self) -> TextDecoder:
        return self._decoders.new()

    @property
    def guides(self) -> GuideCompiler | None:
        """The compiler of guides; None if answers of this model cannot be guided."""
        return self._guides

    def _ids(self, prepare: PrepareRequest, text: str | None) -> list[int]:
        """The token ids of a prompt, which is cut if the request asks for it.

        Raises:
            ClientError: the text is not valid Unicode, or too long.
        """
        request = prepare.inputs
        cut = self._truncation(prepare)
        if text is None:
            ids = request.token_ids or []
            return ids if cut is None else cut.of_ids(ids)
        if cut is None:
            return self.encode(request, text)
        if request.messages is None and not request.chat:
            return self._tokenizer.encode_cut(text, cut)
        return cut.of_ids(self.encode(request, text))

    def _truncation(self, prepare: PrepareRequest) -> Truncation | None:
        """The truncation that a request asks for.

        Raises:
            ClientError: it would cut the end of a chat, where the answer begins.
        """
        request, params = prepare.inputs, prepare.params
        is_chat = request.token_ids is None and (request.messages is not None or request.chat)
        if is_chat and params.truncation_side == "right":
            raise ClientError(
                "truncation_side: expected 'left' for a chat, whose answer begins at its end; found 'right'",
                code="not_supported",
            )
        is_answered = not params.warm and OF_PROMPTS.isdisjoint(request.output_modalities)
        return Truncation.of(
            params,
            longest=max(1, self._max_seq_len - (max(1, params.max_tokens or 1) if is_answered else 0)),
            side="left" if is_chat else self._truncation_side,
        )

    def encode(self, request: Inputs, text: str) -> list[int]:
        """The token ids of a prompt's text.

        Raises:
            ClientError: the text is not valid Unicode, or too long.
        """
        is_rendered = request.messages is not None or request.chat  # a template writes special tokens itself
        return self._tokenizer.encode(text, add_special_tokens=not is_rendered)

    def _pooling(self, request: Inputs, params: Params, tokens: int) -> PoolingParams | None:
        if EMBEDDING in request.output_modalities:
            return self._embedding.pooling(params.dimensions)
        if HIDDEN_STATES not in request.output_modalities:
            return None
        _check_states(tokens, self._embedding.size)
        return PoolingParams(mode="none")

    def _check_guide(self, _: Guide, stop_token_ids: Sequence[int]) -> None:
        if self._guides is None:
            raise ClientError(
                "guide: answers of this model cannot be guided: a text is not the concatenation of its "
                "tokens; leave the guide out",
                code="not_supported",
            )
        if not self.eos_ids and not stop_token_ids:
            raise ClientError(
                "guide: this model has no end-of-sequence token: name a token in stop_token_ids",
                code="not_supported",
            )


def check_inputs(request: Inputs) -> None:
    """Refuse media.

    Raises:
        ClientError: the request has some.
    """
    if request.files or set(request.input_modalities) - {"text"}:
        found = [medium.modality for medium in request.files] or request.input_modalities
        raise ClientError(f"this model reads text only; found {found}", code="unsupported_modality")


def _check_outputs(request: Inputs, params: Params) -> None:
    outputs = set(request.output_modalities)
    if outputs not in ({"text"}, {EMBEDDING}, {HIDDEN_STATES}, set()):
        raise ClientError(
            "this model generates text, makes an embedding, or returns hidden states; asked for "
            f"{request.output_modalities}",
            code="unsupported_modality",
        )
    if EMBEDDING not in outputs and params.dimensions is not None:
        raise ClientError(
            "dimensions: expected none without an embedding; add it to output_modalities, or leave it out"
        )
    if outputs & OF_PROMPTS and (request.tools or params.warm or params.echo or params.logprobs is not None):
        raise ClientError(
            "expected no tools, warm, echo or logprobs together with "
            f"{', '.join(outputs)}, which is no answer"
        )


def _check_states(tokens: int, size: int) -> None:
    """Check that the log takes all hidden states of a prompt. `size` is the length of one.

    Raises:
        ClientError: there are too many.
    """
    most = MAX_STATES_BYTES // (4 * max(1, size))
    if tokens > most:
        raise ClientError(
            f"hidden_states: expected at most {most} tokens, whose states are {MAX_STATES_BYTES >> 20} MiB, "
            f"found {tokens}; split the prompt, or ask for an embedding",
            code="hidden_states_too_large",
            status=413,
        )
