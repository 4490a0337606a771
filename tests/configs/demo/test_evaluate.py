"""The measure measures: right answers count, wrong ones are named, and the shipped checkpoint does well."""

from itertools import islice

import pytest
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from configs.demo import evaluate
from configs.demo.conversations import Conversation, Turn, load_corpus
from configs.demo.phrases import OTHER_QUESTIONS, QUESTIONS
from tests.configs.demo.test_checkpoint import CHECKPOINT

CORPUS = load_corpus()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype="float32").eval()


def test_a_wrong_answer_is_counted_and_named(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    right = Turn("What does len do?", CORPUS["len"])
    wrong = Turn("And abs?", "Return the moon.")

    score = evaluate.score(model, tokenizer, [Conversation((right, wrong)), Conversation((right,))])

    assert (score.answers, score.right, score.wrong) == (3, 2, ("And abs?",))


def test_an_answer_that_does_not_end_where_it_should_is_wrong(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    cut = Turn("What does len do?", CORPUS["len"].removesuffix(" in a container."))

    assert evaluate.score(model, tokenizer, [Conversation((cut,))]).right == 0


@pytest.mark.slow
def test_nearly_every_question_it_was_taught_is_answered_to_the_letter(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer
) -> None:
    """Every nineteenth of them, to be quick; `configs.demo.evaluate` asks them all."""
    score = evaluate.score(model, tokenizer, islice(evaluate.taught(CORPUS), 0, None, 19))

    assert score.answers > 1000
    assert score.right / score.answers > 0.98


@pytest.mark.slow
def test_dialogues_are_answered_turn_by_turn(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    score = evaluate.score(model, tokenizer, evaluate.dialogues(CORPUS, turns=4, count=30))

    assert score.answers == 120
    assert score.right / score.answers > 0.95


def test_no_unseen_form_was_seen() -> None:
    assert not set(evaluate.UNSEEN_QUESTIONS) & set(QUESTIONS)
    assert not set(evaluate.UNSEEN_STRANGERS) & set(OTHER_QUESTIONS)
