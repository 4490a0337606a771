"""The parameters of a request: sampling, limits, logprobs, and constraints on the answer."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from shared.events.inputs import MAX_SCHEMA_DEPTH
from shared.events.json_values import check_json_values

MAX_CHOICES: Final = 1024
"""The maximum number of answers to one question."""
MAX_LOGPROBS: Final = 20
"""The maximum number of most likely tokens that are reported with each sampled token."""
MAX_BIASES: Final = 1024
"""The maximum number of tokens whose logits a request may change."""
MAX_ALLOWED: Final = 8192
"""The maximum number of tokens to which a request may restrict its answer."""
MAX_GUIDE_BYTES: Final = 131_072
"""The maximum size of a guide, as MessagePack."""
MAX_OPTIONS_BYTES: Final = 1_048_576
"""The maximum size of a family's options, as MessagePack."""
_ID_DIGITS: Final = 10
_BIASES_SCHEMA: Final = {
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
}
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class GuideReasoning(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Free text before a guided answer, between two marks.

    Attributes:
        opens, closes: the marks.
        is_open: the prompt ends with the opening mark: the answer begins within the text, and has to close
            it. Otherwise the answer may begin with the text, or have none.
        max_tokens: after so many tokens of the answer the closing mark has to follow; None is no limit.
    """

    opens: Annotated[str, Meta(min_length=1, max_length=64)]
    closes: Annotated[str, Meta(min_length=1, max_length=64)]
    is_open: bool = False
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class Guide(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A constraint that the answer always satisfies. Exactly one field besides `reasoning` is set.

    Attributes:
        json_schema: JSON that is valid by this schema, with the properties in the schema's order.
        json_object: any JSON object.
        regex: a text that the regular expression matches as a whole, in the syntax of Rust's `regex`.
        grammar: a text of this grammar, in llguidance's dialect of Lark, from the rule `start` on.
        choice: one of these texts.
        reasoning: free text that may come before.
    """

    json_schema: dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: Annotated[str, Meta(min_length=1)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    choice: (
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)] | None
    ) = None
    reasoning: GuideReasoning | None = None

    def __post_init__(self) -> None:
        names = [name for name in self.__struct_fields__ if name != "reasoning"]
        given = [
            n for n in names if getattr(self, n) is not None and (n != "json_object" or self.json_object)
        ]
        if len(given) != 1:
            found = ", ".join(given) if given else "none of them"
            raise ValueError(f"expected one of {', '.join(names)}; found {found}")
        if isinstance(self.json_schema, dict):
            try:
                check_json_values([self.json_schema], MAX_SCHEMA_DEPTH)
            except ValueError as error:
                raise ValueError(f"json_schema: {error}") from error
        try:
            size = len(msgspec.msgpack.encode(self))
        except UnicodeEncodeError as error:
            raise ValueError(f"{given[0]}: expected valid Unicode, found a lone surrogate") from error
        if size > MAX_GUIDE_BYTES:
            raise ValueError(f"{given[0]}: expected at most {MAX_GUIDE_BYTES} bytes, found {size}")


class Params(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The parameters of a request. None means the checkpoint's default (`generation_config.json`).

    Attributes:
        max_tokens: the maximum number of new tokens; None means the deployment's `default_max_tokens`. 0 is
            allowed with `echo` and with `warm` only.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 is off.
        min_p: keep the tokens that are at least this times as likely as the likeliest token; 0 is off.
        repetition_penalty: make tokens of the prompt and of the answer less likely; 1 is off.
        presence_penalty: subtracted from the logit of each token that the answer contains.
        frequency_penalty: subtracted from a token's logit once for each occurrence in the answer.
        logit_bias: added to logits, by token id, -100 to 100. JSON writes the ids as strings; MessagePack may
            write them as integers.
        bad_words: texts, or sequences of token ids, that the answer must not contain.
        allowed_token_ids: the only tokens that are chosen; those that end an answer have to be among them,
            except where a guide ends it. Empty: all.
        min_tokens: no token ends the answer before it has so many tokens; a stop text still does.
        seed: derived from the request id if absent, so that a replay uses the same seed.
        stop: texts that end the answer. The answer does not include them.
        stop_token_ids: tokens that end the answer, also with `ignore_eos`. Its text does not include them.
        choice: the index of this answer among several to one question; it also enters the random seed.
        logprobs: report the log probability of each token (raw log-softmax), and of so many of the likeliest
            tokens; None reports none.
        echo: put the prompt before the answer, as text; with `logprobs`, with its tokens' log probabilities.
            `ids`: put the ids of its tokens before the answer, without text and log probabilities.
        voice: the voice of a speech model; None is its first one.
        guide: a constraint on the answer; reasoning before it is free.
        thinking_budget: the most tokens of reasoning, for a model that thinks; then the answer has to begin.
        dimensions: the length of an embedding; None is the checkpoint's own.
        truncate_prompt_tokens: keep at most so many tokens of the prompt, or of each text of `Inputs.texts`
            with its query and the tokenizer's special tokens; -1 is the longest that the model takes. None is
            the checkpoint's own rule.
        truncation_side: the end at which a text is cut: `right` keeps its first tokens, `left` its last ones.
            None is the tokenizer's own side; of a chat the last tokens are kept.
        max_tokens_per_doc: keep at most so many tokens of each text that is compared with a query, before the
            query and special tokens are added; None is no such limit.
        cache_salt: the prompt's keys and values are shared only with requests that have the same one, so that
            nobody else can tell by the time of a first token what was asked before.
        warm: compute the prompt for later requests with the same prefix, and answer nothing.
        options: parameters of the model's family, by name (`models.options`).
    """

    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str | int, Any], Meta(extra_json_schema=_BIASES_SCHEMA)] = {}
    bad_words: (
        Annotated[
            list[
                Annotated[str, Meta(min_length=1, max_length=1024)]
                | Annotated[list[_TokenId], Meta(min_length=1, max_length=1024)]
            ],
            Meta(max_length=256),
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[list[_TokenId], Meta(max_length=MAX_ALLOWED)] = []
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=256)] = []
    ignore_eos: bool = False
    choice: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)] = 0
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | Literal["ids"] = False
    voice: Annotated[str, Meta(max_length=64)] | None = None
    guide: Guide | None = None
    thinking_budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    warm: bool = False
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.max_tokens == 0 and not self.echo and not self.warm:
            raise ValueError("max_tokens: expected an integer >= 1, found 0")
        if self.warm and (self.max_tokens or self.echo):
            raise ValueError("warm: expected neither max_tokens nor echo with it, found one of them")
        if self.max_tokens and self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: expected at most max_tokens, which is {self.max_tokens}, "
                f"found {self.min_tokens}"
            )
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens: expected an integer >= 1, or -1, found 0")
        # Equal requests have equal digests: each meaning has one spelling.
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name) == 0:
                msgspec.structs.force_setattr(self, name, None)
        if self.logit_bias:
            msgspec.structs.force_setattr(self, "logit_bias", _normalised_biases(self.logit_bias))
        if self.options:
            _check_options(self.options)


def _check_options(options: dict[str, Any]) -> None:
    """Raise a ValueError for options that are too many, too deep or no JSON."""
    try:
        check_json_values([options], MAX_SCHEMA_DEPTH)
        size = len(msgspec.msgpack.encode(options))
    except UnicodeEncodeError as error:
        raise ValueError("options: expected valid Unicode, found a lone surrogate") from error
    except ValueError as error:
        raise ValueError(f"options: {error}") from error
    if size > MAX_OPTIONS_BYTES:
        raise ValueError(f"options: expected at most {MAX_OPTIONS_BYTES} bytes, found {size}")


def _normalised_biases(given: dict[str | int, Any]) -> dict[str | int, float]:
    """Return the biases sorted by token id, with ids as strings. Errors name the wrong entry."""
    if len(given) > MAX_BIASES:
        raise ValueError(f"logit_bias: expected at most {MAX_BIASES} tokens, found {len(given)}")
    found: dict[int, float] = {}
    for key, bias in given.items():
        is_number = isinstance(key, int) or (key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS)
        token_id = int(key) if is_number else -1
        if not 0 <= token_id < 2**31:
            raise ValueError(f"logit_bias: expected token ids, found {str(key)[:80]!r}")
        if token_id in found:
            raise ValueError(f"logit_bias: expected each token once, found {token_id} twice")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(
                f"logit_bias: expected numbers from -100 to 100, found {bias!r:.80} for token {token_id}"
            )
        found[token_id] = float(bias)
    return {str(token_id): found[token_id] for token_id in sorted(found)}
