import pytest

from dalsegno.history.reply import Reply
from dalsegno.replay import fork, recorded_request
from dalsegno.replay.fork import ForkSource
from dalsegno.replay.recorded_request import History
from shared.errors import ClientError
from shared.events import Inputs, OutputChunk, Params, RequestFinished, Usage
from shared.log.port import StoredRecord
from shared.subjects import Address
from shared.transcript import Transcript
from tests.admissions import admitted
from tests.conductor.script import SUBJECTS
from tests.dalsegno.histories import answered, bundled, collected


def history(records: list[StoredRecord] | None = None) -> History:
    return recorded_request.of_log(collected(records or answered()))


def at(where: str, records: list[StoredRecord] | None = None) -> tuple[ForkSource, int]:
    return fork.located(history(records), where)


def test_a_fork_at_the_submission_is_the_same_question_with_the_seed_it_had() -> None:
    told, seq = at("request.submitted")
    event = fork.forked(told, seq, ["temperature=0.5", "max_tokens=7"])
    assert event.inputs == Inputs(text="What?")
    assert (event.params.temperature, event.params.max_tokens) == (0.5, 7)
    assert told.admitted is not None
    assert event.params.seed == told.admitted.seed
    assert event.forked_from is not None
    assert (event.forked_from.request_id, event.forked_from.seq) == ("r1", 3)
    assert event.forked_from.changes == {"temperature": 0.5, "max_tokens": 7}


def test_a_fork_in_the_answer_keeps_what_was_said_until_then() -> None:
    told, seq = at("9", answered(params=Params(max_tokens=10, min_tokens=5)))
    event = fork.forked(told, seq, [])
    assert event.inputs.token_ids == [1, 2, 3, 0, 1]
    assert event.inputs.text is None
    assert (event.params.max_tokens, event.params.min_tokens) == (8, 3)


def test_its_id_is_new_and_can_be_chosen() -> None:
    told, seq = at("3")
    made = {str(fork.forked(told, seq, []).request_id) for _ in range(9)}
    assert len(made) == 9
    assert all(one.startswith("r1-fork-") for one in made)
    assert fork.forked(told, seq, [], "mine").request_id == "mine"
    with pytest.raises(ClientError, match="cannot be used"):
        fork.forked(told, seq, [], "not.mine")


def test_a_long_id_is_not_made_longer_than_an_id_can_be() -> None:
    told, seq = at("3")
    told = ForkSource(
        **{name: getattr(told, name) for name in told.__struct_fields__} | {"request_id": "x" * 64}
    )
    assert len(str(fork.forked(told, seq, []).request_id)) < 64


@pytest.mark.parametrize(
    ("where", "changes", "said"),
    [
        ("12", [], "can be forked from record 3, its submission, to before record 12, its last; found 12"),
        ("2", [], "found 2"),
        ("9", ["text=Who?"], "text cannot be changed after the first chunk of an answer: fork at 3 for that"),
        ("3", ["temprature=1"], "--set temprature: no such key; expected one of "),
        ("3", ["temperature"], "--set temperature: expected key=value"),
        ("3", ["temperature=hot"], "--set temperature: Expected `float"),
        ("3", ["max_tokens=0"], "--set max_tokens: "),
        ("3", ['messages=[{"role": 1e999}]'], "expected a JSON value"),
    ],
)
def test_what_cannot_be_forked_is_refused(where: str, changes: list[str], said: str) -> None:
    with pytest.raises(ClientError) as refusal:
        fork.forked(*at(where), changes)
    assert said in refusal.value.message


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ("text=Who?", "text", "Who?"),
        ("inputs.text=Who?", "text", "Who?"),
        ('messages=[{"role":"user","content":"Who?"}]', "messages", [{"role": "user", "content": "Who?"}]),
        ("token_ids=[1,2]", "token_ids", [1, 2]),
    ],
)
def test_another_question_takes_the_place_of_the_old_one(change: str, field: str, value: object) -> None:
    event = fork.forked(*at("3"), [change])
    assert getattr(event.inputs, field) == value
    others = {"text", "messages", "token_ids"} - {field}
    assert all(getattr(event.inputs, other) is None for other in others)


def test_model_and_timeout_are_the_requests_own() -> None:
    event = fork.forked(*at("3"), ["model=other", "timeout_s=9.5"])
    assert (event.model, event.timeout_s) == ("other", 9.5)


def test_sound_cannot_be_gone_on_with() -> None:
    records = answered(data=b"sound")
    assert fork.forked(*at("8", records), []).inputs.token_ids == [1, 2, 3, 0]
    with pytest.raises(ClientError, match=r"not all text cannot be continued; fork at .* record 3"):
        fork.forked(*at("9", records), [])


def test_what_is_redacted_cannot_be_asked_again() -> None:
    header, kept = bundled(answered(), redact=True)
    redacted = History(
        source="x.bundle",
        requests=header.requests,
        records=[one.record for one in kept],
        subjects=SUBJECTS,
        is_redacted=True,
    )
    with pytest.raises(ClientError, match=r"x\.bundle is redacted"):
        fork.located(redacted, "3")


def test_of_several_parts_the_one_whose_record_it_is() -> None:
    records = answered()
    told, _ = fork.located(recorded_request.of_log(collected(records, "other", "r1")), "node.ready")
    assert told.request_id == "r1"


def reply(*texts: str) -> Reply:
    made, transcript, address = Reply(), Transcript(), Address(kind="output", writer="w0")
    made.take(address, admitted("f"), 19, 0)
    for index, text in enumerate(texts):
        chunk = OutputChunk(request_id="f", attempt=1, index=index, text=text, token_ids=[index])
        transcript.fold(chunk)
        made.take(address, chunk, 20 + index, 0)
    usage = Usage(prompt_tokens=3, completion_tokens=len(texts))
    finished = RequestFinished(usage=usage, finish_reasons=["length"], output=transcript.totals, history=b"")
    made.take(address, finished, 99, 1)
    return made


def test_answers_are_compared_behind_the_fork() -> None:
    told, seq = at("3")
    same = fork.compared(told, seq, reply("secret0", "secret1", "secret2"))
    assert same.equal
    other = fork.compared(told, seq, reply("secret0", "secreX"))
    assert (other.equal, other.same_tokens, other.same_chars) == (False, 2, 12)
    told, seq = at("8")
    behind = fork.compared(told, seq, reply("secret1"))
    assert (behind.before["text"], behind.same_chars) == ("secret1secret2", 7)
