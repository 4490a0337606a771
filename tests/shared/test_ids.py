"""An id is a valid token of a subject."""

import pytest

from shared.errors import ClientError
from shared.ids import is_prefix, is_token, parse_request_id
from shared.log.nats.permissions import permissions
from shared.subjects import Subjects
from tests.hostile import NO_TOKENS

hostile = pytest.mark.parametrize("text", NO_TOKENS.values(), ids=NO_TOKENS)


@pytest.mark.parametrize("text", ["a", "A-1_b", "0", "x" * 64])
def test_letters_digits_and_two_marks_are_an_id(text: str) -> None:
    assert is_token(text)
    assert parse_request_id(text) == text


@hostile
def test_nothing_else_is(text: str) -> None:
    assert not is_token(text)
    assert not is_prefix(text)
    with pytest.raises(ClientError) as caught:
        parse_request_id(text)
    assert caught.value.code == "invalid_request_id"
    assert "\n" not in caught.value.message


@hostile
def test_no_other_is_read_out_of_a_subject_as_a_rank(text: str) -> None:
    subjects = Subjects()

    assert subjects.parse(f"ds.worker.{text}") is None
    assert subjects.parse(f"ds.done.{text}.r1") is None
    assert subjects.parse(f"ds.edge.0.{text}.r1") is None


@hostile
def test_no_other_is_granted_anything(text: str) -> None:
    for role in (text, f"worker-{text}", f"client-{text}"):
        with pytest.raises(ValueError, match="unknown role"):
            permissions(role, Subjects(), "_INBOX")
