"""The demo model's training data: conversations about the corpus, generated from a seed.

All answers come from `docstrings.json` or `phrases`: the sentence of a name, some small talk, and one answer
for everything unknown. Questions vary in form, case, punctuation and parentheses. A conversation has up to a
dozen turns; some have a system message, and some turns depend on earlier ones ("Say that again."). The same
seed gives the same lessons on every machine and version of Python: only `random.Random.random` is used, whose
results Python guarantees.

Independent of tokens and tensors.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from configs.demo.phrases import (
    AFTER,
    AGAIN,
    BARE,
    BEFORE,
    CORE_QUESTIONS,
    FILLERS,
    FOLLOW_UPS,
    OTHER_QUESTIONS,
    QUESTIONS,
    REFUSAL,
    SMALL_TALK,
    STRANGERS,
    SYLLABLES,
    SYSTEMS,
)

CORPUS: Final = Path(__file__).parent / "docstrings.json"

MAX_TURNS: Final = 12

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its correct answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """One training conversation. `raw`: plain text, without the chat template."""

    turns: tuple[Turn, ...]
    system: str | None = None
    raw: bool = False

    def messages(self) -> list[dict[str, str]]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        talk = [
            {"role": role, "content": content}
            for turn in self.turns
            for role, content in (("user", turn.question), ("assistant", turn.answer))
        ]
        return head + talk


def load_corpus(path: Path = CORPUS) -> dict[str, str]:
    """Load the names and their sentences, as `collect` stored them."""
    docstrings: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["docstrings"]
    return docstrings


def with_bare_names(corpus: Mapping[str, str]) -> dict[str, str]:
    """Return the corpus with methods also under their bare names: `split` is `str.split`."""
    names = dict(corpus)
    for owner in BARE:
        for name, sentence in corpus.items():
            if name.rpartition(".")[0] == owner:
                names.setdefault(name.rpartition(".")[2], sentence)
    return names


class Lessons:
    """An endless, seeded supply of conversations. Each name is used once before any is used again."""

    def __init__(self, corpus: Mapping[str, str], seed: int) -> None:
        self._random = random.Random(seed).random
        self._names = with_bare_names(corpus)
        self._known = {name.lower() for name in self._names}
        self._plain_names = sorted(self._names)
        self._words = sorted(set(re.findall(r"\b[a-z]{3,}\b", " ".join(corpus.values()))) - self._known)
        self._round = self._rounds()

    def single(self) -> Conversation:
        """Make a conversation of one turn."""
        chance = self._random()
        if chance < 0.18:
            return self._raw()
        if chance < 0.36:
            return Conversation(turns=(self._other_turn(),), system=self._system())
        return Conversation(turns=(self._turn(QUESTIONS),), system=self._system())

    def dialogue(self) -> Conversation:
        """Make a conversation of several turns; later ones can depend on earlier ones."""
        turns: list[Turn] = []
        length = 2 + int(self._random() * self._random() * (MAX_TURNS - 1))
        while len(turns) < length:
            chance = self._random()
            if turns and chance < 0.2:
                turns.append(Turn(self._vary(self._choose(AGAIN)), turns[-1].answer))
            elif turns and chance < 0.40:
                turns.append(self._turn(FOLLOW_UPS))
            elif chance < 0.55:
                turns.append(self._other_turn())
            else:
                turns.append(self._turn(QUESTIONS))
        return Conversation(turns=tuple(turns), system=self._system())

    def _choose(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]

    def _rounds(self) -> Iterator[str]:
        while True:
            yield from sorted(self._names, key=lambda _: self._random())

    def _turn(self, forms: Sequence[str]) -> Turn:
        name = next(self._round)
        form = self._choose(CORE_QUESTIONS if forms is QUESTIONS and self._random() < 0.4 else forms)
        return Turn(self._ask(form, name), self._names[name])

    def _ask(self, form: str, name: str) -> str:
        """Make a question about `name`, sometimes with words before or after it."""
        question = self._vary(form).replace("{}", self._spell(name))
        chance = self._random()
        if chance < 0.06:
            return self._choose(BEFORE) + question
        if chance < 0.12:
            return question + self._choose(AFTER)
        return question

    def _spell(self, name: str) -> str:
        """Write a name in one of its usual forms."""
        chance = self._random()
        if chance < 0.25:
            return f"{name}()"
        if chance < 0.30:
            return f"`{name}`"
        if chance < 0.34 and name.isalpha() and name.capitalize() not in self._names:
            return name.capitalize()
        return name

    def _vary(self, form: str) -> str:
        """Vary a question as people type it: often without capital, question mark or full stop."""
        if self._random() < 0.3:
            form = form.rstrip("?.")
        if self._random() < 0.3:
            form = form[:1].lower() + form[1:]
        if form[-1:].isalpha() and self._random() < 0.1:
            form += self._choose("?.!")
        return form

    def _other_turn(self) -> Turn:
        """Make a turn of small talk, or one with a question that the model must refuse."""
        chance = self._random()
        if chance < 0.25:
            answer = self._choose(tuple(SMALL_TALK))
            return Turn(self._vary(self._choose(SMALL_TALK[answer])), answer)
        if chance < 0.5:
            return Turn(self._vary(self._fill(self._choose(OTHER_QUESTIONS))), REFUSAL)
        form = self._choose(FOLLOW_UPS if chance < 0.55 else QUESTIONS)
        return Turn(self._ask(form, self._stranger()), REFUSAL)

    def _fill(self, question: str) -> str:
        for kind, options in FILLERS.items():
            while f"{{{kind}}}" in question:
                word = self._choose(options if self._random() < 0.5 else self._words)
                question = question.replace(f"{{{kind}}}", word, 1)
        while "{n}" in question:
            question = question.replace("{n}", str(int(self._random() * self._random() * 200)), 1)
        return question

    def _stranger(self) -> str:
        """Make a name that is not in the corpus."""
        name = self._unchecked_stranger()
        while name.lower() in self._known:
            name = self._unchecked_stranger()
        return name

    def _unchecked_stranger(self) -> str:
        """Make a real name from elsewhere, a plain word, an invented name, or a wrong join of two names."""
        chance = self._random()
        if chance < 0.3:
            return self._choose(STRANGERS)
        invented = "".join(self._choose(SYLLABLES) for _ in range(1 + int(self._random() * 3)))
        word = invented if chance < 0.45 else self._choose(self._words)
        if chance < 0.65:
            return word
        if chance < 0.75:
            return f"{self._choose(BARE)}.{word}"
        one, other = self._choose(self._plain_names), self._choose(self._plain_names)
        if chance < 0.9:
            return f"{one.rpartition('.')[0] or self._choose(BARE)}.{other.rpartition('.')[2]}"
        return one[: len(one) // 2 + 1] + other[len(other) // 2 :]

    def _system(self) -> str | None:
        chance = self._random()
        if chance < 0.7:
            return None
        if chance < 0.85:
            return self._choose(SYSTEMS)
        known = tuple(self._names.values())
        return " ".join(self._choose(known) for _ in range(1 + int(self._random() * 2)))

    def _raw(self) -> Conversation:
        """Make plain text for completion without chat: `len: Return the number of items ...`."""
        turn = self._turn(QUESTIONS)
        if self._random() < 0.5:
            name = next(self._round)
            turn = Turn(f"{name}:", self._names[name])
        return Conversation(turns=(turn,), raw=True)
