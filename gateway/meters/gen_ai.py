"""OpenTelemetry's conventions for generative AI: operations, and the histograms that `/metrics` exposes.

The names, buckets and units are those of the conventions. `gateway.meters.answers` measures, and
`gateway.operations.metrics` exposes under the names that OpenTelemetry's rules make for Prometheus:
`gen_ai.server.request.duration` in seconds is `gen_ai_server_request_duration_seconds`. The attributes of
spans are in `gateway.requests.generation_span`.

Source: https://github.com/open-telemetry/semantic-conventions-genai, metrics of model servers.
"""

from collections import defaultdict
from typing import Final

from shared.events import Usage
from shared.telemetry.histogram import Histogram

PROVIDER: Final = "dalsegno"
"""`gen_ai.provider.name`: the conventions have no name for servers of one's own."""
CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"
EMBEDDINGS: Final = "embeddings"
GENERATE_CONTENT: Final = "generate_content"
OPERATIONS: Final = {
    "/api/chat": CHAT,
    "/api/embed": EMBEDDINGS,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/completions": TEXT_COMPLETION,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/rerank": "rerank",
    "/v1/score": "score",
    "/warm": "warm",
}
"""`gen_ai.operation.name` by route, for all but `generate_content`. The last three are our own: the
conventions have no operation of this kind."""

_DURATION_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
_OUTPUT_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS: Final = tuple(float(4**exponent) for exponent in range(14))


def operation_of(route: str) -> str:
    """Return `gen_ai.operation.name` for a route, the path's template."""
    return OPERATIONS.get(route, GENERATE_CONTENT)


class GenAiMeters:
    """The histograms of the conventions, by operation, provider and model.

    Attributes:
        request_s: the duration of each answer. The last label is the code of its error, or empty.
        first_token_s: of answers that finished: from the request's body to the first token sent.
        output_token_s: of answers that finished: the mean time of a token after the first ones.
        tokens: the tokens of each answer with a usage. The last label is `input` or `output`.
    """

    def __init__(self) -> None:
        self.request_s = _histograms(_DURATION_S)
        self.first_token_s = _histograms(_FIRST_TOKEN_S)
        self.output_token_s = _histograms(_OUTPUT_TOKEN_S)
        self.tokens = _histograms(_TOKENS)

    def observe(
        self,
        operation: str,
        model: str,
        *,
        took_s: float,
        error: str,
        first_token_s: float | None,
        output_token_s: float | None,
        usage: Usage | None,
    ) -> None:
        """Count an answer that ended; None is what it did not have."""
        labels = (operation, PROVIDER, model)
        self.request_s[*labels, error].observe(took_s)
        if usage is not None:
            self.tokens[*labels, "input"].observe(usage.prompt_tokens)
            self.tokens[*labels, "output"].observe(usage.completion_tokens)
        if error:
            return
        if first_token_s is not None:
            self.first_token_s[labels].observe(first_token_s)
        if output_token_s is not None:
            self.output_token_s[labels].observe(output_token_s)


def _histograms(bounds: tuple[float, ...]) -> defaultdict[tuple[str, ...], Histogram]:
    return defaultdict(lambda: Histogram.over(bounds))
