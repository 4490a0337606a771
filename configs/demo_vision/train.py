"""Training of the demo model that sees, from scratch on one CPU core.

    python -m configs.demo_vision.train --out configs/demo_vision/checkpoint

First the tower learns to tell colours and shapes apart, with a linear head for each, which are then dropped.
Then the whole model learns the lessons. Without the first part it learns colours and no shapes: the answers
alone teach the tower too little.

It writes a checkpoint in the layout of the Hugging Face hub, and `training.json`, the record of the run. The
lessons and the initial weights depend on the seed. The result is bit-identical on the same machine with the
same versions, and equal up to rounding elsewhere. A server does not need this module.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
)

from configs.demo_vision.lessons import Lesson, random_lesson
from configs.demo_vision.pictures import COLOURS, SHAPES, draw, random_scene

M = TypeVar("M", bound=torch.nn.Module)

SEED: Final = 31
TOWER_STEPS: Final = 2600
STEPS: Final = 2000
WARM_UP: Final = 60
LEARNING_RATE: Final = 4e-3
WEIGHT_DECAY: Final = 0.02
TOWER_BATCH: Final = 64
BATCH: Final = 24
VOCABULARY: Final = 448
SIDE: Final = 32  # pixels
PATCH: Final = 8
IMAGE_TOKENS: Final = (SIDE // PATCH) ** 2
IGNORED: Final = -100  # the label of a token that is not an answer

END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
IMAGE: Final = "<image>"
SPECIAL: Final = (END_OF_TEXT, TURN_START, TURN_END, IMAGE)

ATTRIBUTES: Final[Mapping[str, Sequence[str]]] = {
    "colour": list(COLOURS),
    "shape": list(SHAPES),
    "background": list(COLOURS),
}
"""The attributes of a scene that the tower learns first, with their values."""

CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content or [] %}
            {{- '<image>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded token ids and labels, (B, T), and the pixels of all pictures, (N, 3, SIDE, SIDE)."""

    ids: Tensor
    labels: Tensor
    pixels: Tensor


def image_processor(side: int = SIDE) -> SiglipImageProcessorPil:
    """The processor that makes (3, side, side) pixels of a picture."""
    return SiglipImageProcessorPil(size={"height": side, "width": side})


def build_tokenizer() -> Tokenizer:
    """Train a byte-level BPE on the lessons. It can encode any UTF-8."""
    chance = random.Random(SEED)
    texts = [
        text for _ in range(6000) for turn in random_lesson(chance) for text in (turn.question, turn.answer)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_model(
    tokenizer: Tokenizer,
    *,
    side: int = SIDE,
    patch: int = PATCH,
    text: Mapping[str, int] = MappingProxyType({}),
    vision: Mapping[str, int] = MappingProxyType({}),
) -> LlavaForConditionalGeneration:
    """Make the untrained model: a SigLIP tower, a projector and a Llama.

    Args:
        tokenizer: the tokenizer, for the ids of special tokens.
        side: the side of an image in pixels.
        patch: the side of a patch in pixels.
        text: other sizes of the language model than the demo's, by their name in its configuration.
        vision: other sizes of the tower.
    """
    torch.manual_seed(SEED)
    of_text = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    of_vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": side,
        "patch_size": patch,
        "vision_use_head": False,
    }
    config = LlavaConfig(
        text_config=of_text | dict(text),
        vision_config=of_vision | dict(vision),
        image_token_index=tokenizer.token_to_id(IMAGE),
        image_seq_length=(side // patch) ** 2,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def encode(tokenizer: Tokenizer, lesson: Lesson) -> tuple[list[int], list[int]]:
    """The token ids and labels of a lesson, with the chat template and a token for each patch."""
    ids: list[int] = []
    labels: list[int] = []

    def add(text: str, *, answer: bool) -> None:
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids.extend(piece)
        labels.extend(piece if answer else [IGNORED] * len(piece))

    for turn in lesson:
        pictures = IMAGE * IMAGE_TOKENS * len(turn.scenes)
        question = f"{pictures}{turn.question}{TURN_END}\n"
        add(f"{TURN_START}user\n{question}{TURN_START}assistant\n", answer=False)
        add(f"{turn.answer}{TURN_END}", answer=True)
        add("\n", answer=False)
    return ids, labels


def batches(tokenizer: Tokenizer) -> Iterator[Batch]:
    """Yield batches of lessons without end, padded on the right."""
    chance, processor = random.Random(SEED + 1), image_processor()
    while True:
        lessons = [random_lesson(chance) for _ in range(BATCH)]
        pictures = [draw(scene, chance) for lesson in lessons for turn in lesson for scene in turn.scenes]
        pixels = processor(pictures, return_tensors="pt")["pixel_values"]
        yield _stack([encode(tokenizer, lesson) for lesson in lessons], pixels)


def _stack(examples: Sequence[tuple[list[int], list[int]]], pixels: Tensor) -> Batch:
    width = max(len(ids) for ids, _ in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for row, (row_ids, row_labels) in enumerate(examples):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        labels[row, : len(row_ids)] = torch.tensor(row_labels)
    return Batch(ids, labels, pixels)


def loss_of(model: LlavaForConditionalGeneration, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the answers. Padding on the right does not affect a causal model."""
    hidden = model.model(
        input_ids=batch.ids[:, :-1], pixel_values=batch.pixels, use_cache=False
    ).last_hidden_state
    targets = batch.labels[:, 1:]
    answers = targets != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[answers]), targets[answers])


def build_optimizers(model: LlavaForConditionalGeneration) -> tuple[torch.optim.Optimizer, ...]:
    """Make the optimizers: Muon for the layers' matrices, AdamW for the rest."""
    layers = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and ".layers." in name]
    taken = {id(weight) for weight in layers}
    others = [weight for weight in model.parameters() if id(weight) not in taken]
    muon = torch.optim.Muon(
        layers, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
    )
    return muon, torch.optim.AdamW(others, lr=LEARNING_RATE / 2, betas=(0.9, 0.95), weight_decay=0.0)


def learning_rate(step: int, steps: int) -> float:
    """Return the factor of the learning rates: linear warm-up, then half a cosine down to zero."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (steps - WARM_UP)))


class SceneClassifier(torch.nn.Module):
    """The tower, with a linear head for each attribute of a scene over the mean of its states."""

    def __init__(self, tower: torch.nn.Module, hidden: int) -> None:
        super().__init__()
        self.tower = tower
        self.heads = torch.nn.ModuleList(torch.nn.Linear(hidden, len(names)) for names in ATTRIBUTES.values())

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """Return the logits of each attribute, from (N, 3, SIDE, SIDE) pixels."""
        states = self.tower(pixel_values=pixels).last_hidden_state.mean(dim=1)
        return [head(states) for head in self.heads]


def scene_losses() -> Callable[[SceneClassifier], Tensor]:
    """Return a function that computes the loss of a new batch of pictures at each call."""
    chance, processor = random.Random(SEED + 2), image_processor()

    def loss_of_next(model: SceneClassifier) -> Tensor:
        scenes = [random_scene(chance) for _ in range(TOWER_BATCH)]
        pictures = [draw(scene, chance) for scene in scenes]
        logits = model(processor(pictures, return_tensors="pt")["pixel_values"])
        losses = [
            torch.nn.functional.cross_entropy(
                found, torch.tensor([names.index(getattr(scene, attribute)) for scene in scenes])
            )
            for found, (attribute, names) in zip(logits, ATTRIBUTES.items(), strict=True)
        ]
        return torch.stack(losses).sum()

    return loss_of_next


def lesson_losses(tokenizer: Tokenizer) -> Callable[[LlavaForConditionalGeneration], Tensor]:
    """Return a function that computes the loss of the next batch of lessons at each call."""
    supply = batches(tokenizer)
    return lambda model: loss_of(model, next(supply))


def train(model: M, loss_of_next: Callable[[M], Tensor], steps: int) -> Iterator[float]:
    """Yield the loss of each step; one optimizer step per item."""
    optimizers = build_optimizers(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    model.train()
    for step in range(steps):
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * learning_rate(step, steps)
        loss = loss_of_next(model)
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        yield loss.item()


def save(
    model: LlavaForConditionalGeneration, tokenizer: Tokenizer, out: Path, record: dict[str, Any]
) -> None:
    """Write the checkpoint folder: bfloat16 weights, tokenizer, template, processor, defaults, the record."""
    end, text_end = tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)
    model.generation_config = GenerationConfig(eos_token_id=[end, text_end], pad_token_id=text_end)
    model.to(torch.bfloat16).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IMAGE],
        chat_template=CHAT_TEMPLATE,
        model_max_length=model.config.text_config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    vision = model.config.vision_config
    image_processor(vision.image_size).save_pretrained(out)
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE,
        "patch_size": vision.patch_size,
        "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0,
    }
    _write(out / "processor_config.json", processor)
    # Greedy is the library's default, which it does not write; state it for servers.
    _rewrite(out / "generation_config.json", do_sample=False)
    # The names that every version of transformers reads.
    _rewrite(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    _rewrite(out / "preprocessor_config.json", image_processor_type="SiglipImageProcessor")
    tokenizer_file = out / "tokenizer.json"
    compact = json.dumps(
        json.loads(tokenizer_file.read_text(encoding="utf-8")), separators=(",", ":"), ensure_ascii=False
    )
    tokenizer_file.write_text(compact + "\n", encoding="utf-8")
    (out / "model.safetensors").chmod(0o644)  # created readable by its owner only
    _write(out / "training.json", record)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _rewrite(path: Path, **values: Any) -> None:
    _write(path, json.loads(path.read_text(encoding="utf-8")) | values)


def _followed(losses: Iterator[float], what: str, began_s: float) -> list[float]:
    """Return all losses; print their mean every 50 steps."""
    found: list[float] = []
    for loss in losses:
        found.append(loss)
        if len(found) % 50 == 0:
            mean, took_s = sum(found[-50:]) / 50, time.monotonic() - began_s
            sys.stdout.write(f"{what}: step {len(found)}  loss {mean:.4f}  {took_s:.0f} s\n")
            sys.stdout.flush()
    return found


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description="Train the demo model that sees.")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--tower-steps", type=int, default=TOWER_STEPS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    began = time.monotonic()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    classifier = SceneClassifier(model.model.vision_tower, model.config.vision_config.hidden_size)
    tower_losses = _followed(train(classifier, scene_losses(), options.tower_steps), "tower", began)
    losses = _followed(train(model, lesson_losses(tokenizer), options.steps), "lessons", began)
    record = {
        "seed": SEED,
        "tower_steps": options.tower_steps,
        "steps": options.steps,
        "first_tower_losses": [round(loss, 4) for loss in tower_losses[:3]],
        "first_losses": [round(loss, 4) for loss in losses[:3]],
        "last_loss": round(sum(losses[-50:]) / len(losses[-50:]), 5),
        "seconds": round(time.monotonic() - began),
        "torch": torch.__version__,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, options.out, record)


if __name__ == "__main__":
    main()
