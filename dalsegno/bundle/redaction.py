"""Rewrites of single events for a bundle: without memory secrets, or without what clients wrote."""

import hashlib
import secrets
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from shared.events import (
    AnyEvent,
    BatchCreated,
    BatchEnded,
    ConversationChanged,
    ConversationCreated,
    EpochOpened,
    Failure,
    Guide,
    Inputs,
    MalformedEventError,
    Media,
    NamedTool,
    NodeFired,
    NodeReady,
    NodeWork,
    OutputChunk,
    Params,
    ProcessEnd,
    Refusal,
    RequestAdmitted,
    RequestCancel,
    RequestCancelled,
    RequestFailed,
    RequestRejected,
    RequestsRefused,
    RequestSubmitted,
    SequenceHandover,
    StreamSent,
    TokenLogprobs,
    Tool,
    WalkCall,
    WalkCompleted,
    WalkFailed,
    WalkResult,
    WalkStop,
    WalkStopped,
    WorkerJoined,
    decode,
)
from shared.log.port import StoredRecord
from shared.subjects import Subjects
from shared.tensors import Handle

Rewrite = Callable[[AnyEvent, str | None], AnyEvent]
"""A function from an event and its subject's request id to the event in its place."""

_BUGS_FROM: Final = 500
"""Messages of lower statuses are about the client's text, and quote it."""
_KEPT_KEYS: Final = frozenset({"role", "type", "finish_reason", "modality", "content_type"})
"""Keys whose texts are not a client's, and which code branches on."""
_TOKENS_IN: Final = frozenset({"bad_words", "stop_reason", "token_ids"})


def without_endpoints(event: AnyEvent, request_id: str | None = None) -> AnyEvent:
    """Return the event without memory endpoints."""
    if isinstance(event, WorkerJoined) and event.cards:
        return msgspec.structs.replace(event, cards={})
    return event


class Redaction:
    """Removes the client's text and the answers: texts become digests, tokens and tensors zeros.

    The digests are keyed, and the key is discarded: equal texts of one bundle have equal digests, but no text
    can be found by trying. Lengths in tokens, times, ranks and numeric parameters stay.

    Args:
        admitted: the requests whose model name is the deployment's; other model names are the client's text.
    """

    def __init__(self, admitted: Iterable[str]) -> None:
        self._key = secrets.token_bytes(16)
        self._admitted = frozenset(admitted)

    def __call__(self, event: AnyEvent, request_id: str | None) -> AnyEvent:
        event = without_endpoints(event)
        match event:
            case RequestSubmitted():
                return self._submission(event, is_admitted=request_id in self._admitted)
            case RequestCancel() | RequestCancelled() | WalkStop():
                return msgspec.structs.replace(event, reason=self.text(event.reason))
            case WorkerJoined() | EpochOpened() if event.ended:
                return msgspec.structs.replace(event, ended=[self._end(one) for one in event.ended])
            case WalkFailed():
                return msgspec.structs.replace(
                    event, failure=self._failure(event.failure), work=self._work(event.work)
                )
            case RequestRejected() | RequestFailed():
                return msgspec.structs.replace(event, failure=self._failure(event.failure))
            case RequestsRefused():
                samples = [self._refusal(one) for one in event.samples]
                return msgspec.structs.replace(event, samples=samples)
            case BatchCreated():
                return msgspec.structs.replace(event, metadata=self._plain(event.metadata))
            case ConversationCreated():
                return msgspec.structs.replace(
                    event, metadata=self._plain(event.metadata), items=self._plain(event.items)
                )
            case ConversationChanged():
                return msgspec.structs.replace(
                    event,
                    metadata=self._plain(event.metadata),
                    added=self._plain(event.added),
                    settled=self._plain(event.settled),
                )
            case BatchEnded():
                problems = [
                    msgspec.structs.replace(one, message=self.text(one.message)) for one in event.problems
                ]
                return msgspec.structs.replace(event, problems=problems)
            case OutputChunk():
                return self._chunk(event)
            case WalkCompleted():
                results = [self._result(one) for one in event.results]
                return msgspec.structs.replace(event, results=results, work=self._work(event.work))
            case WalkStopped():
                return msgspec.structs.replace(event, work=self._work(event.work))
            case NodeReady():
                walks = [self._call(one) for one in event.walks]
                return msgspec.structs.replace(event, walks=walks)
            case NodeFired():
                row = self._row(event.row) if event.row is not None else None
                return msgspec.structs.replace(event, outputs=self._handles(event.outputs), row=row)
            case StreamSent() if event.items is not None:
                return msgspec.structs.replace(event, items=_emptied(event.items))
            case _:
                return event

    def text(self, text: str) -> str:
        """The replacement of a text; an empty text stays empty."""
        return f"redacted-{self._digest(text.encode(errors='surrogatepass'))}" if text else ""

    def blank(self, data: bytes) -> bytes:
        """The replacement of bytes that are not an event."""
        return f"redacted, {len(data)} bytes: {self._digest(data)}".encode()

    # ---- by kind -----------------------------------------------------------------------------------
    def _submission(self, event: RequestSubmitted, *, is_admitted: bool) -> RequestSubmitted:
        inputs, params = event.inputs, event.params
        forked = event.forked_from
        if forked is not None:
            forked = msgspec.structs.replace(forked, changes=self._plain(forked.changes))
        return msgspec.structs.replace(
            event,
            model=event.model if is_admitted else self.text(event.model),
            correlation=self.text(event.correlation) if event.correlation else event.correlation,
            inputs=self._inputs(inputs),
            params=self._params(params),
            forked_from=forked,
            api_fields=self._plain(event.api_fields),
        )

    def _inputs(self, inputs: Inputs) -> Inputs:
        return msgspec.structs.replace(
            inputs,
            messages=None if inputs.messages is None else self._plain(inputs.messages),
            text=None if inputs.text is None else self.text(inputs.text),
            token_ids=None if inputs.token_ids is None else [0] * len(inputs.token_ids),
            texts=None if inputs.texts is None else [self._text_or_ids(one) for one in inputs.texts],
            queries=[self._text_or_ids(one) for one in inputs.queries],
            files=[self._medium(one) for one in inputs.files],
            tools=[self._tool(one) for one in inputs.tools],
            tool_choice=self._tool_choice(inputs.tool_choice),
            template_options=self._plain(inputs.template_options),
        )

    def _text_or_ids(self, found: str | list[int]) -> str | list[int]:
        return self.text(found) if isinstance(found, str) else [0] * len(found)

    def _tool(self, tool: Tool) -> Tool:
        definition = tool.function
        function = msgspec.structs.replace(
            definition,
            name=self.text(definition.name),
            description=None if definition.description is None else self.text(definition.description),
            parameters=None if definition.parameters is None else self._schema(definition.parameters),
        )
        return msgspec.structs.replace(tool, function=function)

    def _tool_choice(self, choice: str | NamedTool | None) -> Any:
        if not isinstance(choice, NamedTool):
            return choice
        function = msgspec.structs.replace(choice.function, name=self.text(choice.function.name))
        return msgspec.structs.replace(choice, function=function)

    def _guide(self, guide: Guide) -> Guide:
        schema = guide.json_schema
        return msgspec.structs.replace(
            guide,
            json_schema=self._schema(schema) if isinstance(schema, dict) else schema,
            regex=None if guide.regex is None else self.text(guide.regex),
            grammar=None if guide.grammar is None else self.text(guide.grammar),
            choice=None if guide.choice is None else [self.text(one) for one in guide.choice],
            reasoning=None
            if (free := guide.reasoning) is None
            else msgspec.structs.replace(free, opens=self.text(free.opens), closes=self.text(free.closes)),
        )

    def _schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The replacement of a schema: its names are the client's text too."""
        return {"$comment": self.text(repr(schema))}

    def _params(self, params: Params) -> Params:
        bad_words: Any = params.bad_words
        return msgspec.structs.replace(
            params,
            guide=None if params.guide is None else self._guide(params.guide),
            stop=[self.text(one) for one in params.stop],
            cache_salt=None if params.cache_salt is None else self.text(params.cache_salt),
            bad_words=bad_words
            and [self.text(one) if isinstance(one, str) else [0] * len(one) for one in bad_words],
        )

    def _medium(self, medium: Media) -> Media:
        return msgspec.structs.replace(
            medium,
            digest=self._media_digest(medium.digest) if medium.digest else "",
            data=None if medium.data is None else self._digest(medium.data).encode(),
            ref=self.text(medium.ref) if medium.ref else medium.ref,
            name=self.text(medium.name) if medium.name else medium.name,
        )

    def _media_digest(self, digest: str) -> str:
        """A keyed digest in place of a medium's: by its own, anyone could tell that it is a known file."""
        return hashlib.blake2b(bytes.fromhex(digest), digest_size=32, key=self._key).hexdigest()

    def _chunk(self, chunk: OutputChunk) -> OutputChunk:
        logprobs, metadata = chunk.logprobs, chunk.metadata
        if "token_ids" in metadata:  # the prompt's, of an echo
            metadata = metadata | {"token_ids": [0] * len(metadata["token_ids"])}
        if chunk.advisory and "progress" in metadata:  # plain values of the family's choice
            metadata = metadata | {"progress": {}}
        return msgspec.structs.replace(
            chunk,
            metadata=metadata,
            text=self.text(chunk.text),
            token_ids=[0] * len(chunk.token_ids),
            logprobs=None if logprobs is None else [_UNKNOWN] * len(logprobs),
            data=None if chunk.data is None else self._digest(chunk.data).encode(),
        )

    def _failure(self, failure: Failure) -> Failure:
        if failure.status >= _BUGS_FROM:
            return failure
        return msgspec.structs.replace(failure, message=self.text(failure.message))

    def _refusal(self, refusal: Refusal) -> Refusal:
        return msgspec.structs.replace(
            refusal,
            message=refusal.message if refusal.status >= _BUGS_FROM else self.text(refusal.message),
            param=self.text(refusal.param) if refusal.param else refusal.param,
            correlation=self.text(refusal.correlation) if refusal.correlation else refusal.correlation,
        )

    def _result(self, result: WalkResult) -> WalkResult:
        facts, outputs = self._plain(result.facts), self._handles(result.outputs)
        return msgspec.structs.replace(result, facts=facts, outputs=outputs)

    def _work(self, work: dict[str, NodeWork]) -> dict[str, NodeWork]:
        """The work of nodes without the ids of other requests, by which those could be cancelled."""
        return {
            node: msgspec.structs.replace(
                one,
                behind=[self.text(name) for name in one.behind],
                beside={self.text(name): tokens for name, tokens in one.beside.items()},
                preemptions=[
                    msgspec.structs.replace(found, by=self.text(found.by)) for found in one.preemptions
                ],
            )
            for node, one in work.items()
        }

    def _end(self, end: ProcessEnd) -> ProcessEnd:
        """The end of a process; its last line may quote a request."""
        return msgspec.structs.replace(end, last_line=self.text(end.last_line))

    def _call(self, call: WalkCall) -> WalkCall:
        return msgspec.structs.replace(call, args=self._plain(call.args), inputs=self._handles(call.inputs))

    def _row(self, row: SequenceHandover) -> SequenceHandover:
        return msgspec.structs.replace(
            row, token_ids=[0] * len(row.token_ids), logprobs=[_UNKNOWN] * len(row.logprobs)
        )

    def _handles(self, handles: dict[str, Handle]) -> dict[str, Handle]:
        return {name: _emptied(handle) for name, handle in handles.items()}

    def _plain(self, value: Any, key: str = "") -> Any:
        """Redact untyped values: texts, and token ids under known keys."""
        match value:
            case str():
                return value if key in _KEPT_KEYS else self.text(value)
            case bytes():
                return self._digest(value).encode()
            case dict():
                return {name: self._plain(item, str(name)) for name, item in value.items()}
            case list() | tuple():
                return [self._plain(item, key) for item in value]
            case int() if key in _TOKENS_IN and not isinstance(value, bool):
                return 0
            case _:
                return value

    def _digest(self, data: bytes) -> str:
        return hashlib.blake2b(data, digest_size=8, key=self._key).hexdigest()


_UNKNOWN: Final = TokenLogprobs(id=0, token=b"")


def _emptied(handle: Handle) -> Handle:
    """A tensor of the same shape, with zeros for its inline bytes."""
    if handle.data is None:
        return handle
    return msgspec.structs.replace(handle, data=bytes(len(handle.data)))


def admitted_in(records: Iterable[StoredRecord], subjects: Subjects) -> set[str]:
    """The requests that were admitted in these records."""
    found = set()
    for record in records:
        address = subjects.parse(record.subject)
        if address is None or address.kind != "walk":
            continue
        try:
            event = decode(record.data, address.kind)
        except MalformedEventError:
            continue
        if isinstance(event, RequestAdmitted):
            found.add(str(address.request_id))
    return found
