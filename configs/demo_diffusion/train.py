"""Training of the diffusion demo on one CPU core: the chat demo learns to fill in masks.

    python -m configs.demo_diffusion.train --out configs/demo_diffusion/checkpoint

The weights of `configs/demo/checkpoint` are the start, with one more token, the mask. Attention is made
bidirectional. A lesson is a conversation up to an answer; the answer and the end tokens after it are a canvas
of a few blocks. A random share of the tokens of one block is masked, all blocks after it are masked wholly,
and the model learns the masked tokens of that block: what it meets when blocks are generated in turn (LLaDA,
arXiv:2502.09992).

The result is bit-identical on the same machine with the same versions, and equal up to rounding elsewhere.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from configs.demo.conversations import Lessons, load_corpus
from configs.demo.encoding import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, Example, encode
from configs.demo.optimization import Rates, optimized, record_of

SEED: Final = 50
STEPS: Final = 5000
RATES: Final = Rates(peak=3e-3, warm_up=100, weight_decay=0.02)
BATCH_TOKENS: Final = 3072
POOL: Final = 512  # lessons drawn at a time, to be sorted by length
DIALOGUES: Final = 0.1  # the share of lessons with several turns
BLOCK: Final = 16
"""The tokens of a block; the canvas has as many blocks as the answer needs, and up to `SPARE_BLOCKS` more."""
SPARE_BLOCKS: Final = 2
MASK: Final = "<|mask|>"
START: Final = Path(__file__).parent.parent / "demo" / "checkpoint"


@dataclass(frozen=True, slots=True)
class Lesson:
    """A prompt, and the canvas behind it: an answer, then end tokens, whole blocks."""

    prompt: tuple[int, ...]
    canvas: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.canvas)


def load_start() -> tuple[Tokenizer, Qwen3ForCausalLM]:
    """Return the demo's tokenizer with a mask token, and its model with an embedding for that token."""
    tokenizer = Tokenizer.from_file(str(START / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(MASK, special=True)])
    model = Qwen3ForCausalLM.from_pretrained(START, dtype=torch.float32)
    torch.manual_seed(SEED)
    model.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
    return tokenizer, model


def lessons(tokenizer: Tokenizer) -> Iterator[Lesson]:
    """Yield lessons without end."""
    chance = random.Random(SEED + 1)
    supply = Lessons(load_corpus(), SEED + 2)
    end = _id_of(tokenizer, END_OF_TEXT)
    while True:
        conversation = supply.dialogue() if chance.random() < DIALOGUES else supply.single()
        example = encode(tokenizer, conversation)
        prompt, answer = _last_answer(example)
        blocks = -(-len(answer) // BLOCK) + int(chance.random() * (SPARE_BLOCKS + 1))
        yield Lesson(prompt, answer + (end,) * (blocks * BLOCK - len(answer)))


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, f"the demo's tokenizer has {token}"
    return found


def _last_answer(example: Example) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split a conversation before its last answer; what follows the answer is left out."""
    last = max(place for place, is_answer in enumerate(example.answered) if is_answer)
    first = last
    while first and example.answered[first - 1]:
        first -= 1
    return example.ids[:first], example.ids[first : last + 1]


@dataclass(frozen=True, slots=True)
class Batch:
    """Masked lessons, padded on the right: ids and labels (rows, width), and lengths (rows,)."""

    ids: Tensor
    labels: Tensor
    lengths: Tensor


def batches(tokenizer: Tokenizer) -> Iterator[Batch]:
    """Yield batches without end, of about `BATCH_TOKENS` tokens each."""
    chance = random.Random(SEED + 3)
    mask = _id_of(tokenizer, MASK)
    supply = lessons(tokenizer)
    while True:
        pool = sorted(islice(supply, POOL), key=lambda one: one.tokens)
        slices: list[list[Lesson]] = [[]]
        for lesson in pool:
            if (len(slices[-1]) + 1) * lesson.tokens > BATCH_TOKENS:
                slices.append([])
            slices[-1].append(lesson)
        for group in sorted(slices, key=lambda _: chance.random()):
            yield _masked(group, mask, chance)


def _masked(group: list[Lesson], mask: int, chance: random.Random) -> Batch:
    """Mask a share of one block of each lesson, and all blocks after it."""
    width = max(lesson.tokens for lesson in group)
    ids = torch.zeros(len(group), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, lesson in enumerate(group):
        ids[row, : lesson.tokens] = torch.tensor(lesson.prompt + lesson.canvas)
        begin = len(lesson.prompt)
        block = begin + BLOCK * int(chance.random() * (len(lesson.canvas) // BLOCK))
        share = max(chance.random(), 1 / BLOCK)
        places = [place for place in range(block, block + BLOCK) if chance.random() < share] or [block]
        labels[row, places] = ids[row, places]
        ids[row, places] = mask
        ids[row, block + BLOCK : lesson.tokens] = mask
    lengths = torch.tensor([lesson.tokens for lesson in group])
    return Batch(ids, labels, lengths)


def loss_of(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """Return the cross entropy of the masked tokens; every token sees all tokens of its lesson."""
    width = batch.ids.shape[1]
    is_text = torch.arange(width)[None, :] < batch.lengths[:, None]
    seen = torch.zeros(len(batch.ids), 1, width, width).masked_fill(~is_text[:, None, None, :], -torch.inf)
    hidden = model.model(input_ids=batch.ids, attention_mask=seen, use_cache=False).last_hidden_state
    wanted = batch.labels != -100
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), batch.labels[wanted])


def train(model: Qwen3ForCausalLM, supply: Iterator[Batch], steps: int) -> Iterator[float]:
    """Yield the loss of each step; one optimizer step per item."""
    return optimized(model, lambda: loss_of(model, next(supply)), RATES, steps)


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path, record: dict[str, Any]) -> None:
    """Write the checkpoint folder, in the layout of dllm-hub's masked diffusion models."""
    end, text_end = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    model.config.eos_token_id, model.config.pad_token_id = end, text_end
    model.to(torch.bfloat16).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        chat_template=CHAT_TEMPLATE,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    _rewrite(out / "config.json", architectures=["A2DQwen3LMHeadModel"], model_type="a2d-qwen3")
    _rewrite(out / "generation_config.json", do_sample=False, eos_token_id=[end, text_end])
    _rewrite(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (out / "model.safetensors").chmod(0o644)  # created readable by its owner only
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _rewrite(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description="Train the diffusion demo.")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    tokenizer, model = load_start()
    losses = train(model, batches(tokenizer), options.steps)
    record = record_of(losses, seed=SEED, steps=options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, options.out, record)


if __name__ == "__main__":
    main()
