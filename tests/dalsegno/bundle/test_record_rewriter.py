"""Rewritten records contain no redacted text, are consistent, and keep the log's mismatches."""

from typing import Any

import msgspec
import pytest

from conductor.core.replay import Replayer
from dalsegno.bundle import manifest, record_rewriter
from dalsegno.bundle.redaction import Redaction, admitted_in, without_endpoints
from models import registry
from shared.events import (
    Function,
    FunctionName,
    Guide,
    GuideReasoning,
    Inputs,
    NamedTool,
    NodeReady,
    OutputChunk,
    Params,
    Refusal,
    RefusalCount,
    RequestCancel,
    RequestFinished,
    RequestsRefused,
    RequestSubmitted,
    Tool,
    WalkCompleted,
    WorkerJoined,
    decode,
    encode,
)
from shared.log.port import StoredRecord
from tests.conductor.script import SUBJECTS, Script
from tests.dalsegno.histories import answered, bundled


def redacted(records: list[StoredRecord]) -> list[StoredRecord]:
    redaction = Redaction(admitted_in(records, SUBJECTS))
    return record_rewriter.rewritten(records, redaction, graph_of=registry.graph, subjects=SUBJECTS)


def matches(records: list[StoredRecord]) -> bool:
    return Replayer(registry.graph, SUBJECTS).run(records)["r1"].matches


def unlike(records: list[StoredRecord]) -> dict[str, str]:
    changed = redacted(records)
    return record_rewriter.unfaithful(records, changed, graph_of=registry.graph, subjects=SUBJECTS)


def test_nothing_of_question_and_answer_is_left_and_the_control_replay_matches() -> None:
    records = answered("my secret question", params=Params(stop=["secret stop"]), correlation="secret-7")
    assert matches(records)
    changed = redacted(records)
    told = b"".join(record.data for record in changed)
    assert b"secret" not in told
    assert b"secret" in b"".join(record.data for record in records)
    assert matches(changed)
    assert unlike(records) == {}
    assert [r.seq for r in changed] == [r.seq for r in records]
    assert (
        [len(c.token_ids) for c in chunks(changed)]
        == [len(c.token_ids) for c in chunks(records)]
        == [1, 1, 1]
    )
    assert {token for c in chunks(changed) for token in c.token_ids} == {0}


def test_nothing_of_what_the_api_and_the_template_were_told_is_left() -> None:
    records = answered(
        api_fields={"api": "responses", "metadata": {"of": "a secret"}}, template_options={"a": "secret"}
    )
    changed = redacted(records)
    assert b"secret" in records[2].data
    assert b"secret" not in b"".join(record.data for record in changed)
    assert matches(changed)
    assert unlike(records) == {}


@pytest.mark.parametrize("form", [0, 1])
def test_an_echos_tokens_are_removed_and_digests_keep_their_form(form: int) -> None:
    records = answered(metadata={"echo": True, "token_ids": [71, 72]}, form=form)
    changed = redacted(records)
    assert [c.metadata for c in chunks(changed)] == [{}, {"echo": True, "token_ids": [0, 0]}, {}]
    assert unlike(records) == {}
    assert matches(changed)


@pytest.mark.parametrize(("form", "is_found"), [(0, False), (1, True)])
def test_changed_metadata_is_found_unless_the_log_is_older_than_its_digest(form: int, is_found: bool) -> None:
    records = answered(metadata={"sample_rate": 24_000}, form=form)
    changed = [
        msgspec.structs.replace(one, data=one.data.replace(b"\xcd\x5d\xc0", b"\xcd\x1f\x40"))
        for one in records
    ]
    assert [c.metadata for c in chunks(changed)][1] == {"sample_rate": 8_000}
    assert matches(changed) is not is_found


@pytest.mark.parametrize(
    "guide",
    [
        Guide(json_schema={"title": "secret", "properties": {"secret_name": {"enum": ["secret"]}}}),
        Guide(regex="secret|other"),
        Guide(grammar='start: "secret"'),
        Guide(choice=["secret", "other"]),
        Guide(json_object=True, reasoning=GuideReasoning(opens="<secret>", closes="</secret>")),
    ],
)
def test_nothing_of_what_an_answer_has_to_be_is_left(guide: Guide) -> None:
    records = answered(params=Params(guide=guide))
    changed = redacted(records)
    assert b"secret" in records[2].data
    assert b"secret" not in b"".join(record.data for record in changed)
    assert unlike(records) == {}


@pytest.mark.parametrize(
    "choice", ["required", NamedTool(type="function", function=FunctionName(name="secret_tool"))]
)
def test_nothing_of_the_tools_is_left(choice: Any) -> None:
    schema = {"type": "object", "properties": {"secret_name": {"description": "secret"}}}
    tool = Function(name="secret_tool", description="a secret", parameters=schema)
    inputs = Inputs(
        messages=[{"role": "user", "content": "secret"}],
        tools=[Tool(type="function", function=tool)],
        tool_choice=choice,
    )
    script = Script()
    script.open_epoch()
    script.join()
    script.submit("r1", inputs=inputs)
    changed = redacted(script.records)
    assert b"secret_tool" in script.records[2].data
    assert b"secret" not in b"".join(record.data for record in changed)
    assert unlike(script.records) == {}


def chunks(records: list[StoredRecord]) -> list[OutputChunk]:
    return [e for r in records if isinstance(e := decode(r.data, _kind(r)), OutputChunk)]


def test_the_same_text_is_the_same_everywhere_in_one_bundle_and_another_in_the_next() -> None:
    records = answered("my secret question")

    def asked(changed: list[StoredRecord]) -> tuple[str, str]:
        submitted = next(e for r in changed if isinstance(e := decode(r.data, _kind(r)), RequestSubmitted))
        order = next(e for r in changed if isinstance(e := decode(r.data), NodeReady))
        return str(submitted.inputs.text), order.walks[0].args["inputs"]["text"]

    one, other = asked(redacted(records)), asked(redacted(records))
    assert one[0] == one[1]
    assert one[0].startswith("redacted-")
    assert one != other


def _kind(record: StoredRecord) -> str:
    return record.subject.split(".")[1]


def test_what_a_client_says_to_cancel_is_in_the_decision_too_and_in_neither_when_redacted() -> None:
    script = Script()
    script.open_epoch()
    script.join()
    script.submit("r1")
    script.say(SUBJECTS.control("r1"), RequestCancel(id="c", reason="secret reason"))
    changed = redacted(script.records)
    assert b"secret reason" not in b"".join(record.data for record in changed)
    assert matches(changed)


def test_a_wrong_decision_stays_wrong() -> None:
    records = answered()
    place = next(n for n, r in enumerate(records) if isinstance(decode(r.data), RequestFinished))
    finished = decode(records[place].data)
    assert isinstance(finished, RequestFinished)
    usage = msgspec.structs.replace(finished.usage, completion_tokens=99)
    wrong = encode(msgspec.structs.replace(finished, usage=usage))
    records[place] = msgspec.structs.replace(records[place], data=wrong)
    found = Replayer(registry.graph, SUBJECTS).run(redacted(records))["r1"]
    assert found.mismatch is not None
    assert found.mismatch.seq == records[place].seq
    assert found.mismatch.recorded is not None
    assert found.mismatch.recorded["usage"]["completion_tokens"] == 99


def test_a_wrong_output_stays_wrong() -> None:
    records = answered()
    place = next(n for n, r in enumerate(records) if getattr(decode(r.data), "text", "") == "secret1")
    chunk = decode(records[place].data)
    records[place] = msgspec.structs.replace(
        records[place], data=encode(msgspec.structs.replace(chunk, text="otherwise"))
    )
    assert not matches(records)
    assert not matches(redacted(records))


def test_what_could_not_be_read_is_no_more_readable_and_what_cannot_be_replayed_is_said() -> None:
    script = Script()
    script.open_epoch()
    script.say(SUBJECTS.request("r1"), b"a secret that is no event")
    changed = redacted(script.records)
    assert b"secret" not in b"".join(record.data for record in changed)
    assert matches(changed)


def test_facts_that_are_numbers_are_kept_for_plans_go_by_them() -> None:
    def facts(records: list[StoredRecord]) -> list[object]:
        events = [decode(record.data, _kind(record)) for record in records]
        return [result.facts for e in events if isinstance(e, WalkCompleted) for result in e.results]

    records = answered()
    assert facts(redacted(records)) == facts(records)


def test_a_request_that_matched_and_does_not_when_rewritten_is_named() -> None:
    records = answered()
    damaged = [r for r in redacted(records) if not isinstance(decode(r.data, _kind(r)), RequestFinished)]
    found = record_rewriter.unfaithful(records, damaged, graph_of=registry.graph, subjects=SUBJECTS)
    assert found == {"r1": "r1.end is decided, but the log does not have it"}


def test_without_redaction_the_bytes_are_the_logs_but_for_the_cards() -> None:
    records = answered()
    same = record_rewriter.rewritten(records, without_endpoints, graph_of=registry.graph, subjects=SUBJECTS)
    assert all(a is b for a, b in zip(records, same, strict=True))


def test_what_lets_a_worker_read_anothers_tensors_is_never_in_a_bundle() -> None:
    """Though decisions rest on it: the worker joins anew while the request runs."""
    script = Script()
    script.open_epoch()
    for life in ("w0-a", "w0-b"):
        joined = WorkerJoined(
            id=life,
            writer="w0",
            rank=0,
            model="demo",
            nodes=["prepare", "llm"],
            device="cpu",
            kv_tokens=128,
            cards={"tcp": b"secret token"},
        )
        script.say(SUBJECTS.worker(0), joined)
        if life == "w0-a":
            script.submit("r1", inputs=Inputs(text="What?"))
            script.complete(script.last(NodeReady))
    assert matches(script.records)
    header, kept = bundled(script.records)
    assert (header.masked, header.unfaithful) == (True, {})
    assert not any(b"secret token" in one.record.data for one in kept)
    assert matches([one.record for one in kept])
    changed = {type(manifest.event_of(one.record)) for one in kept if one.digest is None}
    assert changed >= {WorkerJoined, NodeReady}


def test_redaction_leaves_no_payload() -> None:
    data = b"sound" * 9
    header, kept = bundled(answered(data=data), redact=True)
    assert header.redacted
    assert not any(data in one.record.data for one in kept)
    assert matches([one.record for one in kept])


def test_nothing_of_what_a_node_tells_of_its_progress_is_left() -> None:
    metadata = {"node": "denoiser", "progress": {"prompt": "a secret"}}
    chunk = OutputChunk(id="r1.adv.1", index=-1, modality="progress", advisory=True, metadata=metadata)
    found = Redaction([])(chunk, "r1")
    assert isinstance(found, OutputChunk)
    assert found.metadata == {"node": "denoiser", "progress": {}}


def test_of_a_refused_request_the_kind_is_left_and_what_quotes_the_client_is_not() -> None:
    secret = "a secret"
    refused = Refusal(
        time_ns=5, code="model_not_found", status=404, tenant="alice", route="POST /generate",
        message=f"no model {secret!r}", param=secret, request_id="r-1", correlation=secret,
    )  # fmt: skip
    ours = Refusal(time_ns=6, code="overloaded", status=503, message="try again")
    counts = [RefusalCount(code="model_not_found", status=404, tenant="alice", count=7)]
    event = RequestsRefused(writer="g-1", since_ns=5, counts=counts, samples=[refused, ours])
    found = Redaction([])(event, None)

    assert isinstance(found, RequestsRefused)
    assert secret not in str(found)
    assert found.counts == counts
    assert [(one.code, one.status, one.tenant, one.request_id) for one in found.samples] == [
        ("model_not_found", 404, "alice", "r-1"), ("overloaded", 503, None, None),
    ]  # fmt: skip
    assert found.samples[1].message == "try again"
