"""Forks: another version of a request that was served, from some position of its log on.

What lies before the position stays as it was: the question and, of an answer in text, the tokens that were
said by then, which become part of the new request's prompt. What comes behind is asked for anew, with what is
set otherwise. It is a request of its own (`forked_from` names the old one, and the changes); the old one and
its log are not touched. Pure but for the id.

Where part of the answer is kept, the sampler begins to count its draws anew behind it: with temperature 0 the
same changes nothing, above it a fork without changes goes on otherwise than the original did.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from dalsegno.bundle import manifest
from dalsegno.history import log_source
from dalsegno.history.log_source import LogSource
from dalsegno.history.reply import Reply
from dalsegno.replay import recorded_request, resubmission
from dalsegno.replay.recorded_request import History
from shared.errors import ClientError
from shared.events import (
    ForkedFrom,
    Inputs,
    NodeReady,
    OutputChunk,
    Params,
    RequestAdmitted,
    RequestSubmitted,
    check_public,
)
from shared.ids import is_token, parse_request_id
from shared.log.nats.permissions import CLIENT
from shared.tensors import read_ids

_INPUTS: Final = frozenset(field.name for field in msgspec.structs.fields(Inputs))
_PARAMS: Final = frozenset(field.name for field in msgspec.structs.fields(Params))
_OWN: Final = frozenset({"model", "timeout_s"})
_ASKED: Final = ("messages", "text", "token_ids")


class ForkSource(msgspec.Struct, frozen=True, kw_only=True):
    """What a history holds of one request, as far as a new one can be made of it.

    Attributes:
        seq: the submission's position, and `end_seq` the request's last.
        prompt_ids: None where no step got tokens to begin with.
    """

    request_id: str
    submission: RequestSubmitted
    seq: int
    end_seq: int
    admitted: RequestAdmitted | None
    prompt_ids: list[int] | None
    reply: Reply


def recorded(history: History, request_id: str) -> ForkSource:
    """Read a request out of a history.

    Raises:
        ClientError: its submission cannot be read.
    """
    submission: RequestSubmitted | None = None
    admitted, prompt_ids, reply = None, None, Reply()
    seq = end_seq = 0
    for record in history.records:
        address = history.subjects.parse(record.subject)
        event = manifest.event_of(record, history.subjects)
        if address is None or event is None or address.request_id not in (None, request_id):
            continue
        if address.request_id is not None:
            end_seq = record.seq
        match event:
            case RequestSubmitted() if submission is None:
                submission, seq = event, record.seq
            case RequestAdmitted() if admitted is None:
                admitted = event
            case NodeReady() if prompt_ids is None:
                prompt_ids = _prompt_in(event)
            case _:
                pass
        reply.take(event, record.seq, record.time_ns)
    if submission is None:
        raise ClientError(
            f"request {request_id!r}: its submission cannot be read: there is nothing to ask again"
        )
    return ForkSource(
        request_id=request_id,
        submission=submission,
        seq=seq,
        end_seq=end_seq,
        admitted=admitted,
        prompt_ids=prompt_ids,
        reply=reply,
    )


def located(history: History, where: str) -> tuple[ForkSource, int]:
    """The request that is forked, and the position: of several parts of a question, the one `where` is of.

    Raises:
        ClientError: there is no such position, or the history says too little.
    """
    timeline = recorded_request.timeline(history)
    record = timeline.positions[timeline.find(where)].record
    address = history.subjects.parse(record.subject)
    of_record = str(address.request_id) if address is not None else ""
    request_id = of_record if of_record in history.requests else history.requests[0]
    if history.is_redacted:
        raise ClientError(
            f"{history.source} is redacted: what was asked is not in it, and cannot be asked again"
        )
    return recorded(history, request_id), record.seq


def forked(
    original: ForkSource, seq: int, changes: Sequence[str], new_id: str | None = None
) -> RequestSubmitted:
    """Another version of a request, the same up to the position `seq`.

    Args:
        original: the request.
        seq: the position.
        changes: each `key=value`: a parameter's name, an input's, `model` or `timeout_s`; the value is JSON,
            or a string as it is.
        new_id: its id; one is made where none is told.

    Raises:
        ClientError: there is no such position, no such key, or no request that is like that.
    """
    if not original.seq <= seq < original.end_seq:
        raise ClientError(
            f"request {original.request_id} can be forked from record {original.seq}, its submission, to "
            f"before record {original.end_seq}, its last; found {seq}"
        )
    wanted = dict(map(_change, changes))
    inputs, params = original.submission.inputs, original.submission.params
    if params.seed is None and original.admitted is not None:
        params = msgspec.structs.replace(params, seed=signed(original.admitted.seed))
    said = _said_by(original, seq)
    if said:
        if inner := sorted(wanted.keys() & _INPUTS):
            raise ClientError(
                f"{inner[0]} cannot be changed once an answer has begun: fork at {original.seq} for that"
            )
        inputs, params = _continued(original, seq, inputs, params)
    event = msgspec.structs.replace(
        original.submission,
        id="",
        writer="",
        number=0,
        request_id=new_id or _new_id(original.request_id),
        inputs=_with(inputs, {k: v for k, v in wanted.items() if k in _INPUTS}, Inputs),
        params=_with(params, {k: v for k, v in wanted.items() if k in _PARAMS}, Params),
        parent=None,
        parts=1,
        correlation=None,
        trace=None,
        forked_from=ForkedFrom(request_id=original.request_id, seq=seq, changes=wanted),
    )
    for name in _OWN & wanted.keys():
        event = _with(event, {name: wanted[name]}, RequestSubmitted)
    parse_request_id(str(event.request_id))
    try:
        check_public(event)
    except ValueError as error:
        raise ClientError(str(error)) from error
    return event


def _continued(original: ForkSource, seq: int, inputs: Inputs, params: Params) -> tuple[Inputs, Params]:
    """What to ask so that the answer goes on behind what was said by `seq`."""
    chunks = _said_by(original, seq)
    if original.prompt_ids is None or any(one.data is not None or one.track for one in chunks):
        raise ClientError(
            "an answer that is not all text cannot be gone on with; fork at the request's submission, "
            f"record {original.seq}"
        )
    kept = [token for one in chunks for token in one.token_ids]
    params = msgspec.structs.replace(
        params,
        echo=False,
        max_tokens=_rest(params.max_tokens, len(kept)),
        min_tokens=None if params.min_tokens is None else max(params.min_tokens - len(kept), 0),
    )
    return (
        Inputs(
            token_ids=original.prompt_ids + kept,
            input_modalities=inputs.input_modalities,
            output_modalities=inputs.output_modalities,
        ),
        params,
    )


def _said_by(original: ForkSource, seq: int) -> list[OutputChunk]:
    """What of the answer was said up to a position."""
    return [one.chunk for one in original.reply.said if one.seq <= seq and not one.chunk.is_echo]


def _rest(max_tokens: int | None, kept: int) -> int | None:
    return None if max_tokens is None else max(max_tokens - kept, 1)


def _prompt_in(event: NodeReady) -> list[int] | None:
    """The tokens a row begins with."""
    for walk in event.walks:
        handle = walk.inputs.get("token_ids")
        if handle is not None and handle.data is not None and handle.dtype == "int32":
            return read_ids(handle)
    return None


def _change(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    key = key.strip().removeprefix("params.").removeprefix("inputs.")
    known = sorted(_PARAMS | _INPUTS | _OWN)
    if not sign or key not in known:
        found = f"--set {text[:80]}: expected key=value" if not sign else f"--set {key[:80]}: no such key"
        raise ClientError(f"{found}; expected one of {', '.join(known)}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _with(whole: Any, changes: dict[str, Any], kind: type[Any]) -> Any:
    """A struct with some fields set, checked as if it had come from a client."""
    if not changes:
        return whole
    plain = msgspec.to_builtins(whole, builtin_types=(bytes,))
    if kind is Inputs and any(name in changes for name in _ASKED):
        for name in _ASKED:
            plain.pop(name, None)
    try:
        return msgspec.convert(plain | changes, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise ClientError(f"--set {', '.join(changes)}: {error}") from error


def signed(seed: int) -> int:
    """A seed as a request may say it."""
    return seed if seed < 1 << 63 else seed - (1 << 64)


def _new_id(request_id: str) -> str:
    tail = f"fork-{secrets.token_hex(3)}"
    name = f"{request_id}-{tail}"
    return name if is_token(name) else tail


# ---- comparing -------------------------------------------------------------------------------------------


class AnswerComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two answers, side by side.

    Attributes:
        same_tokens: so many they begin with in common, of those behind the fork; `same_chars` likewise.
    """

    equal: bool
    same_tokens: int
    same_chars: int
    before: dict[str, object]
    after: dict[str, object]


def compared(original: ForkSource, seq: int, new: Reply) -> AnswerComparison:
    """How a fork's answer differs from what the original said behind the same position."""
    kept = _said_by(original, seq)
    text = original.reply.text[sum(len(one.text) for one in kept) :]
    tokens = original.reply.token_ids[sum(len(one.token_ids) for one in kept) :]
    return AnswerComparison(
        equal=(text, tokens, original.reply.data_digest, original.reply.outcome)
        == (new.text, new.token_ids, new.data_digest, new.outcome),
        same_tokens=_common(tokens, new.token_ids),
        same_chars=_common(text, new.text),
        before=original.reply.plain() | {"text": text, "token_ids": tokens},
        after=new.plain(),
    )


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


# ---- asking, and telling ---------------------------------------------------------------------------------


async def ask(
    original: ForkSource, seq: int, event: RequestSubmitted, where: LogSource, *, wait: bool
) -> AnswerComparison | None:
    """Ask for a fork; with `wait`, how its answer differs from the original's.

    Raises:
        DalSegnoError: nothing runs there, or it does not take the request.
    """
    async with log_source.open_log(where, alive=True, role=CLIENT) as (log, subjects):
        if not wait:
            await resubmission.submit(log, subjects, event)
            return None
        replies = await resubmission.answers(log, subjects, [resubmission.Submission(event=event)])
    return compared(original, seq, replies[str(event.request_id)])


def told(event: RequestSubmitted, found: AnswerComparison | None) -> tuple[list[str], dict[str, Any]]:
    """What is said of a fork, for people and for programs."""
    origin = event.forked_from
    assert origin is not None
    data: dict[str, Any] = {"request_id": event.request_id, "forked_from": msgspec.to_builtins(origin)}
    lines = [f"{event.request_id}: forked from {origin.request_id} at record {origin.seq}"]
    if found is None:
        return [*lines, f"  dalsegno log {event.request_id}   shows what becomes of it"], data
    data["compared"] = msgspec.to_builtins(found)
    after = found.after
    if after["outcome"] != "finished":
        failure = after["failure"]
        why = f": {failure['code']}: {failure['message']}" if isinstance(failure, dict) else ""
        return [*lines, f"  {after['outcome']}{why}"], data
    for name, reply in (("original", found.before), ("fork", after)):
        sound = f" and {reply['data_bytes']:,} bytes" if reply["data_bytes"] else ""
        lines.append(f"  {name}: {json.dumps(reply['text'], ensure_ascii=False)}{sound}")
    if found.equal:
        return [*lines, "  both are the same"], data
    return [*lines, f"  the same for {found.same_tokens} tokens, {found.same_chars} characters"], data
