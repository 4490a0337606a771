"""Measurement of the diffusion demo: the share of correct answers, and the tokens of a forward pass.

    python -m configs.demo_diffusion.evaluate configs/demo_diffusion/checkpoint

Every name of the corpus is asked for in one plain form. An answer is correct if it is the sentence of the
corpus, to its end. Each way to fill in the masks is measured on the same questions; every step computes the
whole canvas.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer

from configs.demo.conversations import load_corpus
from configs.demo.encoding import TURN_END, TURN_START
from models.masked_diffusion.graph import CANVAS
from models.masked_diffusion.nodes import load
from models.programs import TokenRequest
from models.sequence_request import SamplingParams

WAYS: Final[dict[str, dict[str, Any]]] = {
    "one token a step": {},
    "tokens above 0.9 in one step": {"confidence_threshold": 0.9},
    "tokens above 0.6 in one step": {"confidence_threshold": 0.6},
    "8 steps a block": {"steps": 32},
    "4 steps a block": {"steps": 16},
}
BLOCK: Final = 16
MAX_TOKENS: Final = 64


@dataclass(slots=True)
class Score:
    """The result of one way."""

    answers: int = 0
    right: int = 0
    tokens: int = 0
    forwards: int = 0


class Denoiser:
    """The model of a checkpoint, for one answer at a time."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self._node = load(checkpoint, dtype="float32", kwargs={"block_length": BLOCK})
        end = self._tokenizer.token_to_id(TURN_END)
        assert end is not None, f"the demo's tokenizer has {TURN_END}"
        self._end = end

    @torch.inference_mode()
    def answer(self, question: str, options: dict[str, Any], score: Score) -> str:
        """Return the answer to a question, and count its tokens and forward passes."""
        text = f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"
        driver = self._node.token_programs[CANVAS](
            self._node,
            TokenRequest(
                prompt_ids=self._tokenizer.encode(text, add_special_tokens=False).ids,
                prefix_ids=[],
                max_tokens=MAX_TOKENS,
                end_ids=frozenset({self._end}),
                sampling=SamplingParams(),
                options=options,
                seed=0,
                choice=0,
            ),
        )
        found: list[int] = []
        ended = False
        while not ended:
            [asked] = driver.passes()
            ids = torch.tensor([asked.ids])
            seen = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
            logits = self._node.model(input_ids=ids, attention_mask=seen, use_cache=False).logits[0]
            score.forwards += 1
            new = driver.take([logits[list(asked.logits or ())]])
            if new is not None:
                found += new.ids
                ended = new.ended
        found = found[: found.index(self._end)] if self._end in found else found
        score.tokens += len(found) + 1
        return self._tokenizer.decode(found)


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description="Measure the diffusion demo.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--every", type=int, default=4, help="ask for every n-th name of the corpus")
    options = parser.parse_args()

    torch.set_num_threads(1)
    denoiser = Denoiser(options.checkpoint)
    names = sorted(load_corpus().items())[:: options.every]
    for way, asked in WAYS.items():
        score = Score()
        for name, sentence in names:
            score.answers += 1
            score.right += denoiser.answer(f"What does {name} do?", asked, score) == sentence
        share, rate = score.right / score.answers, score.tokens / score.forwards
        sys.stdout.write(
            f"{way:<30}{score.right:>5} of {score.answers:<5}{share:>7.1%}{rate:>7.2f} tokens a forward\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
