"""The lessons are drawn the same for ever: what the checkpoint was taught can be said by anyone."""

import hashlib
import json
from itertools import islice, pairwise

import pytest

from configs.demo.conversations import Conversation, Lessons, Turn, load_corpus, with_bare_names
from configs.demo.phrases import AGAIN, FILLERS, OTHER_QUESTIONS, QUESTIONS, REFUSAL, SMALL_TALK, STRANGERS

CORPUS = load_corpus()


def digest(lessons: Lessons, count: int) -> str:
    drawn = [lesson for _ in range(count) for lesson in (lessons.single(), lessons.dialogue())]
    plain = [[lesson.system, lesson.raw, [[t.question, t.answer] for t in lesson.turns]] for lesson in drawn]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


def test_the_lessons_of_a_seed_never_change() -> None:
    assert digest(Lessons(CORPUS, seed=1), count=500) == "69486e8a294bbf97"


def test_another_seed_gives_other_lessons() -> None:
    assert digest(Lessons(CORPUS, seed=1), count=5) != digest(Lessons(CORPUS, seed=2), count=5)


def test_every_name_is_asked_for_before_any_is_asked_for_again() -> None:
    lessons = Lessons(CORPUS, seed=3)
    names = with_bare_names(CORPUS)

    first_round = list(islice(lessons._round, len(names)))
    second_round = list(islice(lessons._round, len(names)))

    assert sorted(first_round) == sorted(names) == sorted(second_round)
    assert first_round != second_round


def test_every_answer_is_a_docstring_or_one_of_the_few_phrases() -> None:
    lessons = Lessons(CORPUS, seed=4)
    known = {*CORPUS.values(), *SMALL_TALK, REFUSAL}

    turns = [turn for _ in range(1000) for turn in (*lessons.single().turns, *lessons.dialogue().turns)]

    assert {turn.answer for turn in turns} <= known
    assert not [turn for turn in turns if "{" in turn.question]


def test_asking_again_gives_the_answer_of_the_turn_before() -> None:
    lessons = Lessons(CORPUS, seed=5)
    plain = {form.rstrip("?.").lower() for form in AGAIN}

    pairs = [
        (before, turn)
        for _ in range(300)
        for talk in [lessons.dialogue().turns]
        for before, turn in pairwise(talk)
        if turn.question.rstrip("?.!").lower() in plain
    ]

    assert len(pairs) > 50
    assert all(turn.answer == before.answer for before, turn in pairs)


def test_what_it_should_not_know_is_not_in_the_corpus() -> None:
    assert not {name.lower() for name in with_bare_names(CORPUS)} & {name.lower() for name in STRANGERS}


def test_an_invented_name_is_not_a_real_one() -> None:
    lessons = Lessons(CORPUS, seed=6)
    known = with_bare_names(CORPUS)

    assert not [name for name in (lessons._stranger() for _ in range(5000)) if name in known]


def test_every_blank_in_a_form_can_be_filled() -> None:
    lessons = Lessons(CORPUS, seed=7)

    assert all("{" not in lessons._fill(question) for question in OTHER_QUESTIONS)
    assert all(form.count("{}") == 1 for form in QUESTIONS)
    assert all(options for options in FILLERS.values())


@pytest.mark.parametrize(
    ("bare", "full"),
    [("split", "str.split"), ("append", "list.append"), ("sqrt", "math.sqrt"), ("index", "str.index")],
)
def test_a_bare_method_name_means_its_most_likely_owner(bare: str, full: str) -> None:
    assert with_bare_names(CORPUS)[bare] == CORPUS[full]


def test_a_name_of_its_own_is_never_taken_by_a_method() -> None:
    assert with_bare_names(CORPUS)["copy"] == CORPUS["copy"]
    assert with_bare_names(CORPUS)["format"] == CORPUS["format"]


def test_a_conversation_is_told_as_chat_messages() -> None:
    talk = Conversation((Turn("a?", "A."), Turn("b?", "B.")), system="Be brief.")

    assert talk.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "A."},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "B."},
    ]
