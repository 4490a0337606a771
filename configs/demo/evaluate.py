"""Measure a demo checkpoint: the share of answers in which every token is correct.

    python -m configs.demo.evaluate configs/demo/checkpoint

A greedy answer is correct exactly if each of its tokens is the model's first choice after the correct tokens
before it. One forward pass per conversation therefore measures what generation would return. The margin
between first and second choice shows how robust that is. Reported separately: trained questions, unseen forms
of question, several turns, and questions to refuse.
"""

import argparse
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from configs.demo.conversations import Conversation, Lessons, Turn, load_corpus, with_bare_names
from configs.demo.encoding import Example, encode
from configs.demo.phrases import AGAIN, CORE_QUESTIONS, FOLLOW_UPS, REFUSAL

UNSEEN_QUESTIONS: Final = (
    "What's the point of {}?", "Remind me what {} does.", "In short: {}?", "Any idea what {} does?",
    "Teach me {}.", "May I ask what {} is about?", "What would I call {} for?", "Where is {} of use?",
)  # fmt: skip
UNSEEN_STRANGERS: Final = (
    "What is the capital of Spain?", "Who was Marie Curie?", "Write a song about apples.", "Explain perl.",
    "What is tensorflow.keras?", "What does scipy.linalg.solve do?", "Explain zookeeper.",
    "How do I use matplotlib?", "What is 17 minus 4?", "Explain str.frobnicate.", "Tell me about penguins.",
    "What does list.explode do?", "What does foobar do?", "What does shutil.copytree do?",
    "How do I use nonlocal?", "Which film should I watch?",
)  # fmt: skip
FRESH_SEED: Final = 7_000_000
ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a set of conversations. `margin`: smallest lead of a correct token over the next."""

    answers: int
    right: int
    margin: float
    wrong: tuple[str, ...]

    def line(self, name: str) -> str:
        return f"{name:<28}{self.right:>7} of {self.answers:<7}{self.right / self.answers:>9.3%}"


def taught(corpus: Mapping[str, str]) -> Iterator[Conversation]:
    """Yield every name in the plain forms: with and without parentheses, capital and full stop."""
    for name, sentence in corpus.items():
        for form in CORE_QUESTIONS:
            for called in (name, f"{name}()"):
                for shape in dict.fromkeys((form, form.rstrip("?."), form[0].lower() + form[1:])):
                    yield Conversation((Turn(shape.replace("{}", called), sentence),))


def in_forms(corpus: Mapping[str, str], forms: Iterable[str]) -> Iterator[Conversation]:
    """Yield every name of the corpus in each of these forms."""
    for form in forms:
        yield from (Conversation((Turn(form.replace("{}", name), text),)) for name, text in corpus.items())


def dialogues(corpus: Mapping[str, str], turns: int, count: int) -> Iterator[Conversation]:
    """Yield conversations of `turns` turns, each a follow-up or dependent on the previous one."""
    chance = random.Random(turns).random
    names = tuple(corpus)

    def pick(options: tuple[str, ...]) -> str:
        return options[int(chance() * len(options))]

    for _ in range(count):
        talk: list[Turn] = []
        while len(talk) < turns:
            name = pick(names)
            if talk and chance() < 0.2:
                talk.append(Turn(pick(AGAIN), talk[-1].answer))
            else:
                form = pick(CORE_QUESTIONS if not talk or chance() < 0.5 else FOLLOW_UPS)
                talk.append(Turn(form.replace("{}", name), corpus[name]))
        yield Conversation(tuple(talk))


def fresh(corpus: Mapping[str, str], count: int) -> Iterator[Conversation]:
    """Yield lessons of the training's kind, from a seed that was not used for training."""
    lessons = Lessons(corpus, FRESH_SEED)
    return (lessons.single() for _ in range(count))


@torch.inference_mode()
def score(model: Qwen3ForCausalLM, tokenizer: Tokenizer, talks: Iterable[Conversation]) -> Score:
    """Score the answers of all `talks`, one at a time."""
    pairs = sorted(((encode(tokenizer, talk), talk) for talk in talks), key=lambda pair: len(pair[0].ids))
    answers = right = 0
    margin = float("inf")
    wrong: list[str] = []
    supply = iter(pairs)
    while rows := list(islice(supply, ROWS)):
        ids = torch.zeros(len(rows), len(rows[-1][0].ids), dtype=torch.long)
        for row, (example, _) in enumerate(rows):
            ids[row, : len(example.ids)] = torch.tensor(example.ids)
        logits = model(input_ids=ids, use_cache=False).logits.float()
        best = logits.topk(2, dim=-1)
        leads = best.values[..., 0] - best.values[..., 1]
        for row, (example, talk) in enumerate(rows):
            for turn, (start, end) in zip(talk.turns, _answers(example), strict=True):
                answers += 1
                if torch.equal(best.indices[row, start - 1 : end - 1, 0], ids[row, start:end]):
                    right += 1
                    margin = min(margin, leads[row, start - 1 : end - 1].min().item())
                else:
                    wrong.append(turn.question)
    return Score(answers, right, margin, tuple(wrong))


def _answers(example: Example) -> Iterator[tuple[int, int]]:
    start: int | None = None
    for place, answered in enumerate((*example.answered, False)):
        if answered and start is None:
            start = place
        elif not answered and start is not None:
            yield start, place
            start = None


def main() -> None:
    """Print the scores of one checkpoint."""
    parser = argparse.ArgumentParser(description="Measure a demo checkpoint.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--wrong", type=int, default=5, help="number of wrong answers to print per set; default: %(default)s"
    )
    options = parser.parse_args()

    corpus = load_corpus()
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(options.checkpoint, dtype=getattr(torch, options.dtype)).eval()
    bare = {name: text for name, text in with_bare_names(corpus).items() if name not in corpus}
    sets: dict[str, Iterable[Conversation]] = {
        "taught questions": taught(corpus),
        "bare method names": in_forms(bare, CORE_QUESTIONS),
        "plain text, no template": (
            Conversation((Turn(form.replace("{}", name), text),), raw=True)
            for form in ("{}:", "What does {} do?")
            for name, text in corpus.items()
        ),
        "lessons of another seed": fresh(corpus, 4000),
        "unseen forms of question": in_forms(corpus, UNSEEN_QUESTIONS),
        "3 turns": dialogues(corpus, 3, 300),
        "8 turns": dialogues(corpus, 8, 100),
        "16 turns (never trained)": dialogues(corpus, 16, 50),
        "refusals, unseen": (Conversation((Turn(text, REFUSAL),)) for text in UNSEEN_STRANGERS),
    }
    for name, talks in sets.items():
        result = score(model, tokenizer, talks)
        sys.stdout.write(
            f"{result.line(name)}   margin {result.margin:.3f}   {result.wrong[: options.wrong]}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
