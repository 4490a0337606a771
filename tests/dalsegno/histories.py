"""Histories for the tests of export and replay: those of a script, as a log would give them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dalsegno.bundle import export
from dalsegno.bundle.bundle_file import BundledRecord, Header
from dalsegno.history.request_records import RequestRecords
from models import registry
from models.base import ModelGraph
from shared.events import Inputs, Media, NodeReady, OutputChunk, RequestFinished
from shared.log.port import LogState, StoredRecord
from shared.transcript import FORM, Transcript
from tests.conductor.script import SUBJECTS, Script


def answered(
    text: str = "What?",
    *,
    data: bytes | None = None,
    metadata: dict[str, Any] | None = None,
    form: int = FORM,
    modality: str = "text",
    files: Sequence[Media] = (),
    template_options: dict[str, Any] | None = None,
    **submission: Any,
) -> list[StoredRecord]:
    """The log of one finished request with three chunks; the second has some `data` and `metadata`.

    `form` is that of the totals' digest: 0 as in the logs of older versions.
    """
    script = Script(graph_of=_seeing if files else registry.graph)
    script.open_epoch()
    script.join()
    script.submit(
        "r1",
        inputs=Inputs(text=text, files=list(files), template_options=template_options or {}),
        **submission,
    )
    script.complete(script.last(NodeReady))
    ready, transcript = script.last(NodeReady), Transcript()
    for index in range(3):
        chunk = OutputChunk(
            id=f"r1.chunk.{index}",
            writer="w0",
            request_id="r1",
            attempt=ready.attempt,
            incarnation=ready.incarnation,
            index=index,
            text=f"secret{index}",
            text_offset=7 * index,
            token_ids=[index],
            token_offset=index,
            data=data if index == 1 else None,
            modality=modality if index == 1 else "text",
            metadata=metadata or {} if index == 1 else {},
        )
        transcript.fold(chunk)
        script.say(SUBJECTS.output("nats", "r1", "w0"), chunk)
    script.complete(ready, output=transcript.totals_of(form))
    assert script.last(RequestFinished) is not None
    return script.records


def _seeing(family: str) -> ModelGraph:
    """The graph of a family as if it took images."""
    return replace(registry.graph(family), modalities=("text", "image"))


def collected(records: Sequence[StoredRecord], *requests: str) -> RequestRecords:
    """The result of `collect` for a log with these records."""
    ids = list(requests) or ["r1"]
    state = LogState(first_seq=1, last_seq=records[-1].seq, created_ns=0, messages=len(records), bytes=0)
    return RequestRecords(
        request_id=ids[0], requests=ids, subjects=SUBJECTS, records=list(records), log=state
    )


def bundled(
    records: Sequence[StoredRecord], *requests: str, **how: bool
) -> tuple[Header, list[BundledRecord]]:
    """The bundle of a log."""
    asked = {"payloads": False, "redact": False} | how
    return export.bundled(collected(records, *requests), **asked)
