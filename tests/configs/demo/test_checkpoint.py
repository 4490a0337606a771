"""The checkpoint in the repository: of the real format, small, and right.

transformers is imported late: it takes seconds, and the first tests here need only the files.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from configs.demo.conversations import Conversation, Turn, load_corpus
from configs.demo.encoding import encode
from configs.demo.phrases import GREETING, IDENTITY, REFUSAL

DEMO = Path(__file__).parents[3] / "configs" / "demo"
CHECKPOINT = DEMO / "checkpoint"
CORPUS = load_corpus()

ASKED = {
    "What does len do?": CORPUS["len"],
    "What does len() do?": CORPUS["len"],
    "what does len do": CORPUS["len"],
    "What is len?": CORPUS["len"],
    "How do I use sorted?": CORPUS["sorted"],
    "Explain zip.": CORPUS["zip"],
    "print": CORPUS["print"],
    "print?": CORPUS["print"],
    "Explain str.strip.": CORPUS["str.strip"],
    "What does split do?": CORPUS["str.split"],
    "What is dict.get?": CORPUS["dict.get"],
    "What does list.append do?": CORPUS["list.append"],
    "Tell me about math.sqrt": CORPUS["math.sqrt"],
    "What does the isinstance function do?": CORPUS["isinstance"],
    "What is a ValueError?": CORPUS["ValueError"],
    "In Python, what does enumerate do?": CORPUS["enumerate"],
    "What does itertools.chain.from_iterable do?": REFUSAL,
    "How do I use json.loads()?": CORPUS["json.loads"],
    "What does `os.path.join` do?": CORPUS["os.path.join"],
    "Please explain functools.reduce": CORPUS["functools.reduce"],
    "What is random?": CORPUS["random"],
    "Hello": GREETING,
    "Who are you?": IDENTITY,
    "Thanks": "You are welcome.",
    "What is the capital of France?": REFUSAL,
}


def config(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((CHECKPOINT / name).read_text(encoding="utf-8"))
    return content


def test_the_demo_weighs_less_than_two_megabytes_with_all_it_was_made_from() -> None:
    files = [
        path
        for path in DEMO.rglob("*")
        if path.is_file() and not {"__pycache__", ".dalsegno"} & {*path.parts}
    ]

    assert sum(path.stat().st_size for path in files) < 2_000_000
    assert CHECKPOINT / "model.safetensors" in files


def test_the_licence_of_the_docstrings_stands_beside_the_weights() -> None:
    text = (CHECKPOINT / "LICENSE-PSF.txt").read_text(encoding="utf-8")

    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text
    assert "All Rights Reserved" in text


def test_the_configuration_is_that_of_any_qwen3() -> None:
    model = config("config.json")

    assert model["architectures"] == ["Qwen3ForCausalLM"]
    assert model["model_type"] == "qwen3"
    assert model["dtype"] == "bfloat16"
    assert model["max_position_embeddings"] >= 1024


def test_generation_is_greedy_and_ends_at_either_end_token() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    generation = config("generation_config.json")

    assert generation["do_sample"] is False
    assert generation["eos_token_id"] == [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    text = "Naïve 日本語 🎼\tdal segno\n  al fine \u0000"

    assert tokenizer.decode(tokenizer.encode(text).ids) == text


class Chat:
    """The checkpoint, loaded as anyone would load it, and asked greedily: many conversations at once."""

    def __init__(self, dtype: str) -> None:
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        self.tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=getattr(torch, dtype)).eval()
        self.ends = self.model.generation_config.eos_token_id

    def __call__(self, *said: str, system: str | None = None) -> str:
        """The answer to the last of `said`, which are user and assistant in turn."""
        return self.complete([self.prompt(*said, system=system)])[0]

    def answers(self, *talks: tuple[str, ...]) -> list[str]:
        """The answer to each of these conversations."""
        return self.complete([self.prompt(*said) for said in talks])

    def prompt(self, *said: str, system: str | None = None) -> str:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return text

    def complete(self, texts: list[str]) -> list[str]:
        """What follows each of `texts`: one batch, so that a slow processor takes few steps."""
        batch = self.tokenizer(texts, return_tensors="pt", padding=True)
        rows = self.model.generate(**batch, max_new_tokens=80)[:, batch["input_ids"].shape[1] :].tolist()
        return [self._until_its_end(row) for row in rows]

    def _until_its_end(self, row: list[int]) -> str:
        end = next((place for place, id in enumerate(row) if id in self.ends), None)
        assert end is not None, "the answer did not end of itself"
        answer: str = self.tokenizer.decode(row[:end])
        return answer


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def chat(request: pytest.FixtureRequest) -> Chat:
    return Chat(request.param)


@pytest.mark.slow
def test_it_answers_what_it_was_taught_and_refuses_the_rest(chat: Chat) -> None:
    answers = chat.answers(*((question,) for question in ASKED))

    assert dict(zip(ASKED, answers, strict=True)) == ASKED


@pytest.mark.slow
def test_a_later_turn_is_answered_for_itself(chat: Chat) -> None:
    first, second = CORPUS["len"], CORPUS["sorted"]

    assert chat.answers(
        ("What does len do?", first, "And sorted?"),
        ("What does len do?", first, "And sorted?", second, "Thanks"),
        ("Hello", GREETING, "What does len do?", first, "What about abs?"),
    ) == [second, "You are welcome.", CORPUS["abs"]]


@pytest.mark.slow
def test_an_answer_is_said_again_on_demand(chat: Chat) -> None:
    """The same last words, two histories, two answers: the conversation before is truly read."""
    names = ("len", "sorted")

    again = chat.answers(*((f"What does {name} do?", CORPUS[name], "Say that again.") for name in names))

    assert again == [CORPUS[name] for name in names]


def test_a_long_conversation_stays_right(chat: Chat) -> None:
    names = (
        "len",
        "abs",
        "dict.get",
        "math.sqrt",
        "print",
        "str.split",
        "list.append",
        "zip",
        "ord",
        "set.add",
    )
    said = [text for name in names for text in (f"What does {name} do?", CORPUS[name])]

    assert chat(*said, "What is sorted?") == CORPUS["sorted"]


@pytest.mark.parametrize("system", ["You are a helpful assistant.", "You live on the moon and count sheep."])
def test_a_system_message_is_taken(chat: Chat, system: str) -> None:
    assert chat("What does len do?", system=system) == CORPUS["len"]


@pytest.mark.slow
def test_plain_text_is_completed_too(chat: Chat) -> None:
    answers = chat.complete(["len:", "What does sorted do?"])

    assert answers == [f" {CORPUS['len']}", f" {CORPUS['sorted']}"]


def test_the_template_writes_what_training_read() -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    talk = Conversation(
        (Turn("What is len?", "It counts."), Turn("And abs?", "It drops the sign.")), "Be brief."
    )

    served = tokenizer.apply_chat_template(talk.messages(), tokenize=True, return_dict=True)["input_ids"]

    assert tuple(served) == encode(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")), talk).ids
