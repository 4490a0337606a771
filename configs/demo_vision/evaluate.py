"""Measurement of the demo model that sees, with transformers' own `generate`, greedy.

    python -m configs.demo_vision.evaluate configs/demo_vision/checkpoint

An answer counts if it is the expected text, to its end. The lessons are of a seed that training did not use.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import LlavaForConditionalGeneration, SiglipImageProcessorPil

from configs.demo_vision.lessons import NO_PICTURE, Lesson, Turn, random_lesson
from configs.demo_vision.pictures import draw
from configs.demo_vision.train import IMAGE, IMAGE_TOKENS, TURN_END, TURN_START

SEED: Final = 977
_MAX_TOKENS: Final = 96


@dataclass(frozen=True, slots=True)
class Asked:
    """One question of a conversation, with what was said before and the pictures so far."""

    kind: str
    prompt: str
    pictures: list[Image.Image]
    answer: str


def questions(lesson: Lesson, chance: random.Random) -> Iterator[Asked]:
    """The questions of a lesson in order; earlier answers are the right ones."""
    text, pictures = "", list[Image.Image]()
    for number, turn in enumerate(lesson):
        pictures += [draw(scene, chance) for scene in turn.scenes]
        text += f"{TURN_START}user\n{IMAGE * IMAGE_TOKENS * len(turn.scenes)}{turn.question}{TURN_END}\n"
        text += f"{TURN_START}assistant\n"
        yield Asked(_kind(turn, number), text, list(pictures), turn.answer)
        text += f"{turn.answer}{TURN_END}\n"


def _kind(turn: Turn, number: int) -> str:
    if number:
        return "a later turn"
    if len(turn.scenes) > 1:
        return f"{len(turn.scenes)} pictures"
    if not turn.scenes:
        return "no picture"
    is_whole = turn.answer.endswith("background.") and turn.answer != NO_PICTURE
    return "one picture: all of it" if is_whole else "one picture: a detail"


class Answerer:
    """Answers questions with transformers' own model."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self._processor = SiglipImageProcessorPil.from_pretrained(checkpoint)

    @torch.inference_mode()
    def answer(self, asked: Asked) -> str:
        """The greedy answer as text."""
        ids = torch.tensor([self._tokenizer.encode(asked.prompt, add_special_tokens=False).ids])
        pixels = self._processor(asked.pictures, return_tensors="pt") if asked.pictures else {}
        made = self._model.generate(input_ids=ids, **pixels, max_new_tokens=_MAX_TOKENS)
        return str(self._tokenizer.decode(made[0, ids.shape[1] :].tolist()))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Measure the demo model that sees.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--lessons", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chance, answerer = random.Random(SEED), Answerer(options.checkpoint)
    right, total = Counter[str](), Counter[str]()
    for _ in range(options.lessons):
        for asked in questions(random_lesson(chance), chance):
            total[asked.kind] += 1
            right[asked.kind] += answerer.answer(asked) == asked.answer
    for kind in sorted(total):
        share = 100 * right[kind] / total[kind]
        sys.stdout.write(f"| {kind} | {total[kind]} | {share:.1f} % |\n")


if __name__ == "__main__":
    main()
