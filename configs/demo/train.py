"""Training of the demo model from scratch on one CPU core.

    python -m configs.demo.train --out configs/demo/checkpoint

It writes a checkpoint in the layout of the Hugging Face hub, and `training.json`, the record of the run. The
lessons and the initial weights depend on the seed. The result is bit-identical on the same machine with the
same versions, and equal up to rounding elsewhere. A server does not need this module.
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from configs.demo.conversations import Conversation, Lessons, load_corpus
from configs.demo.encoding import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    TURN_END,
    VOCABULARY,
    Example,
    encode,
    train_tokenizer,
)
from configs.demo.optimization import Rates, optimized, record_of

SEED: Final = 20
STEPS: Final = 2500
RATES: Final = Rates(peak=4e-3, warm_up=60, weight_decay=0.05)
BATCH_TOKENS: Final = 2048
POOL: Final = 512  # conversations drawn at a time, to be sorted by length
DIALOGUES: Final = 0.3  # the share of them that have several turns
IGNORED: Final = -100  # the label of a token that is not an answer

Batch: TypeAlias = tuple[Tensor, Tensor]


def build_tokenizer() -> Tokenizer:
    """Train the tokenizer on its own lessons."""
    lessons = Lessons(load_corpus(), SEED)
    return train_tokenizer(islice(_mixed(lessons, random.Random(SEED)), 8000))


def build_model() -> Qwen3ForCausalLM:
    """Make the untrained model."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def _mixed(lessons: Lessons, chance: random.Random) -> Iterator[Conversation]:
    while True:
        yield lessons.dialogue() if chance.random() < DIALOGUES else lessons.single()


def batches(tokenizer: Tokenizer) -> Iterator[Batch]:
    """Yield batches of token ids and labels without end: about `BATCH_TOKENS` each, padded on the right."""
    chance = random.Random(SEED + 1)
    supply = _mixed(Lessons(load_corpus(), SEED + 2), chance)
    while True:
        pool = sorted(
            (encode(tokenizer, lesson) for lesson in islice(supply, POOL)), key=lambda e: len(e.ids)
        )
        slices: list[list[Example]] = [[]]
        for example in pool:
            if (len(slices[-1]) + 1) * len(example.ids) > BATCH_TOKENS:
                slices.append([])
            slices[-1].append(example)
        yield from (_stack(group) for group in sorted(slices, key=lambda _: chance.random()))


def _stack(examples: list[Example]) -> Batch:
    width = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for row, example in enumerate(examples):
        row_ids = torch.tensor(example.ids)
        ids[row, : len(row_ids)] = row_ids
        labels[row, : len(row_ids)] = row_ids.masked_fill(~torch.tensor(example.answered), IGNORED)
    return ids, labels


def loss_of(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the answers. Padding on the right does not affect a causal model."""
    ids, labels = batch
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    targets = labels[:, 1:]
    answers = targets != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[answers]), targets[answers])


def train(model: Qwen3ForCausalLM, supply: Iterator[Batch], steps: int) -> Iterator[float]:
    """Yield the loss of each step; one optimizer step per item."""
    return optimized(model, lambda: loss_of(model, next(supply)), RATES, steps)


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path, record: dict[str, Any]) -> None:
    """Write the checkpoint folder: bfloat16 weights, tokenizer, template, generation defaults, the record."""
    end, text_end = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    model.generation_config = GenerationConfig(eos_token_id=[end, text_end], pad_token_id=text_end)
    model.config.eos_token_id, model.config.pad_token_id = end, text_end
    model.to(torch.bfloat16).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    # Greedy is the library's default, which it does not write; state it for servers.
    _rewrite(out / "generation_config.json", do_sample=False)
    # The file name that every version of transformers reads.
    _rewrite(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    tokenizer_file = out / "tokenizer.json"
    compact = json.dumps(
        json.loads(tokenizer_file.read_text(encoding="utf-8")), separators=(",", ":"), ensure_ascii=False
    )
    tokenizer_file.write_text(compact + "\n", encoding="utf-8")
    (out / "model.safetensors").chmod(0o644)  # created readable by its owner only
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _rewrite(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    tokenizer, model = build_tokenizer(), build_model()
    losses = train(model, batches(tokenizer), options.steps)
    record = record_of(losses, seed=SEED, steps=options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, options.out, record)


if __name__ == "__main__":
    main()
