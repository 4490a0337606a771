"""The span of an answer by OpenTelemetry's conventions for generative AI, within that of its HTTP request.

    POST /v1/chat/completions
     └─ chat demo     gen_ai.*: operation, request, response, usage; events: queued, admitted, resumed

One span covers the requests on the log that one HTTP request submits, which are the choices of one answer.
The spans of conductor and workers are its children, through the `trace` of these requests. Without tracing,
and for a client that does not want a trace, there is no `GenerationSpan`.

Source: https://github.com/open-telemetry/semantic-conventions-genai, spans of inference and embeddings.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gateway.meters.gen_ai import EMBEDDINGS, PROVIDER, operation_of
from gateway.requests.milestones import REQUEST_ID, Milestones
from gateway.requests.parsed_request import ParsedRequest
from gateway.requests.span_contents import input_messages, output_messages
from shared.events import Inputs, OutputChunk, Params, Usage
from shared.telemetry import tracing
from shared.telemetry.tracing import Span

_STOP_CHARS: Final = 256
_OUTPUT_TYPES: Final = {"audio": "speech", "transcript": "text"}
"""`gen_ai.output.type` of our output modalities, where the convention has another name."""


class GenerationSpan:
    """The span of one answer, until `end`.

    Attributes:
        requests: the requests on the log, with the span as their trace.
    """

    def __init__(self, span: Span, requests: Sequence[ParsedRequest], n: int) -> None:
        trace = tracing.traceparent_of(span)
        self.requests = [replace(request, trace=trace) for request in requests]
        self._span = span
        self._milestones: dict[str, Milestones] = {}
        self._finish_reasons: dict[int, str] = {}  # by choice
        self._content_bytes = tracing.content_bytes()
        self._texts: dict[int, list[str]] = {}  # by choice, the beginning of each
        self._text_chars: dict[int, int] = {}
        if self._content_bytes:
            prompts = [request.inputs for request in requests[::n]]
            span.set_attribute("gen_ai.input.messages", input_messages(prompts, self._content_bytes))

    @classmethod
    def begin(
        cls, route: str, requests: Sequence[ParsedRequest], n: int, *, is_stream: bool
    ) -> "GenerationSpan | None":
        """Begin the span of an answer with `n` choices for each prompt; None if it is not traced."""
        if not tracing.is_on():
            return None
        operation, first = operation_of(route), requests[0]
        span = tracing.start_child(
            tracing.get_current_span(),
            f"{operation} {first.model}",
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": first.model,
                "gen_ai.request.stream": is_stream,
                REQUEST_ID: first.parent or first.request_id,
                **_attributes_of(first.params),
                **({"gen_ai.request.choice.count": n} if n > 1 else {}),
                **({} if operation == EMBEDDINGS else {"gen_ai.output.type": _output_type(first)}),
            },
        )
        return cls(span, requests, n) if span.is_recording() else None

    def milestones(self, request_id: str) -> Milestones:
        """Return the milestones of one of the requests, for its relay."""
        return self._milestones.setdefault(request_id, Milestones(request_id))

    def chunk(self, choice: int, chunk: OutputChunk) -> None:
        """Note the text of a chunk, if contents are recorded."""
        known = self._text_chars.get(choice, 0)
        if chunk.text and known < self._content_bytes:  # a character has at least one byte
            self._texts.setdefault(choice, []).append(chunk.text)
            self._text_chars[choice] = known + len(chunk.text)

    def choice_ended(self, choice: int, finish_reason: str) -> None:
        """Note the end of a choice."""
        self._finish_reasons[choice] = finish_reason

    def end(self, error: str | None, usage: Usage | None, first_chunk_s: float | None) -> None:
        """End the span, as failed if there is the code of an `error`. A second call does nothing.

        `first_chunk_s` is the time from the request's body to the first chunk; None without a chunk.
        """
        span = self._span
        if not span.is_recording():
            return
        for milestones in self._milestones.values():
            milestones.write(span)
        if first_chunk_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", first_chunk_s)
        if self._finish_reasons:
            reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if self._texts:
            span.set_attribute("gen_ai.output.messages", self._output_messages())
        if usage is not None:
            first = self.requests[0]
            span.set_attributes(
                {
                    "gen_ai.response.id": first.parent or first.request_id,
                    "gen_ai.response.model": first.model,
                    **_attributes_of_usage(usage, is_warm=first.params.warm),
                }
            )
        if error is not None:
            tracing.fail(span, error)
        span.end()

    def _output_messages(self) -> str:
        answers = [
            ("".join(texts), self._finish_reasons.get(choice, "error"))
            for choice, texts in sorted(self._texts.items())
        ]
        return output_messages(answers, self._content_bytes)


def _attributes_of(params: Params) -> dict[str, str | int | float | bool | Sequence[str]]:
    """Return the parameters that the request gives; the others are the checkpoint's defaults."""
    given = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": None if params.top_k is None else float(params.top_k),  # by the convention
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.stop_sequences": [tracing.exportable(text, _STOP_CHARS) for text in params.stop]
        or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.embeddings.dimension.count": params.dimensions,
    }
    return {name: value for name, value in given.items() if value is not None}


def _attributes_of_usage(usage: Usage, *, is_warm: bool) -> dict[str, int]:
    cached = "cache_creation" if is_warm else "cache_read"  # see `Usage.cached_tokens`
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        f"gen_ai.usage.{cached}.input_tokens": usage.cached_tokens,
    }


def _output_type(request: ParsedRequest) -> str:
    """Return the kind of output that is asked for: the first one that is not text, if there is one."""
    guide = request.params.guide
    if guide is not None and (guide.json_object or guide.json_schema is not None):
        return "json"
    modality = _modality_of(request.inputs)
    return _OUTPUT_TYPES.get(modality, modality)


def _modality_of(inputs: Inputs) -> str:
    return next((one for one in inputs.output_modalities if one != "text"), "text")
