"""Training of the demo model that draws, from scratch on one CPU core.

    python -m configs.demo_draw.train --out first
    python -m configs.demo_draw.train --after first --out configs/demo_draw/checkpoint

First the autoencoder learns the pictures. Then the transformer and the text encoder together learn the flow
from noise to their latents. It writes a folder that diffusers' `ZImagePipeline` loads, and `training.json`,
the record of the run. A second run goes on after the first one, with other pictures. Scenes and initial
weights depend on the seed. A server does not need this module.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from configs.demo_draw.pipeline import PIPELINE, SEED, build_pipeline
from configs.demo_draw.scenes import Scene, caption, draw, random_scene

VAE_STEPS: Final = 700
STEPS: Final = 1500
WARM_UP: Final = 60
VAE_RATE: Final = 3e-3
LEARNING_RATE: Final = 3e-3
VAE_BATCH: Final = 12
BATCH: Final = 32
UNCONDITIONAL: Final = 0.1
"""The share of captions that are left empty, for guidance."""
KL_WEIGHT: Final = 1e-4
AVERAGED: Final = 0.996
"""The share that the averaged weights keep in a step."""
POOL: Final = 6000
"""Pictures that are drawn once, and used again."""
RECORD: Final = "training.json"


@dataclass(frozen=True, slots=True)
class Lessons:
    """Pictures, (n, 3, height, width) from -1 to 1, and their scenes."""

    pixels: Tensor
    scenes: list[Scene]

    @classmethod
    def drawn(cls, number: int, chance: random.Random) -> "Lessons":
        scenes = [random_scene(chance) for _ in range(number)]
        cells = np.stack([np.asarray(draw(scene, chance)) for scene in scenes])
        pixels = torch.from_numpy(cells).permute(0, 3, 1, 2).float() / 127.5 - 1
        return cls(pixels, scenes)


# ---- the autoencoder -----------------------------------------------------------------------------------
def train_vae(vae: Any, lessons: Lessons) -> dict[str, float]:
    """Teach the autoencoder the pictures, and set the scale of its latents."""
    draws = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=VAE_RATE, weight_decay=1e-4)
    loss = torch.zeros(())
    for step in range(VAE_STEPS):
        _set_rate(optimizer, VAE_RATE, step, VAE_STEPS)
        pixels = lessons.pixels[torch.randint(len(lessons.scenes), (VAE_BATCH,), generator=draws)]
        posterior = vae.encode(pixels).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=draws)
        found = vae.decode(posterior.mean + posterior.std * noise).sample
        loss = (found - pixels).abs().mean() + functional.mse_loss(found, pixels)
        total = loss + KL_WEIGHT * posterior.kl().mean()
        _descend(optimizer, total, vae.parameters())
        _say("autoencoder", step, VAE_STEPS, loss)
    vae.eval()
    with torch.no_grad():
        latents = vae.encode(lessons.pixels[:512]).latent_dist.mean
    vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))
    return {"vae_loss": float(loss.detach())}


@torch.no_grad()
def latents_of(vae: Any, lessons: Lessons) -> Tensor:
    """The latents of all pictures, as the pipeline scales them."""
    means = [vae.encode(part).latent_dist.mean for part in torch.split(lessons.pixels, 128)]
    latents: Tensor = (torch.cat(means) - vae.config.shift_factor) * vae.config.scaling_factor
    return latents


# ---- the flow ------------------------------------------------------------------------------------------
def encoded(pipeline: Any, captions: list[str]) -> list[Tensor]:
    """The states of captions, as `ZImagePipeline` encodes them: (tokens, width) each."""
    texts = [
        pipeline.tokenizer.apply_chat_template([{"role": "user", "content": one}], tokenize=False)
        for one in captions
    ]
    inputs = pipeline.tokenizer(texts, padding=True, return_tensors="pt")
    mask = inputs.attention_mask.bool()
    states = pipeline.text_encoder(
        input_ids=inputs.input_ids, attention_mask=mask, output_hidden_states=True
    ).hidden_states[-2]
    return [row[seen] for row, seen in zip(states, mask, strict=True)]


def train_flow(pipeline: Any, lessons: Lessons, steps: int = STEPS, *, seed: int = SEED) -> dict[str, float]:
    """Teach the transformer and the text encoder the flow; they end with their averaged weights."""
    chance, draws = random.Random(seed + 1), torch.Generator().manual_seed(seed + 1)
    latents = latents_of(pipeline.vae, lessons)
    modules = torch.nn.ModuleList([pipeline.transformer, pipeline.text_encoder]).train()
    averaged = [weight.detach().clone() for weight in modules.parameters()]
    optimizer = torch.optim.AdamW(modules.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    smooth = 1.0
    for step in range(steps):
        _set_rate(optimizer, LEARNING_RATE, step, steps)
        chosen = torch.randint(len(lessons.scenes), (BATCH,), generator=draws)
        captions = [
            "" if chance.random() < UNCONDITIONAL else caption(lessons.scenes[int(one)], chance)
            for one in chosen
        ]
        loss = _flow_loss(pipeline, latents[chosen], captions, draws)
        _descend(optimizer, loss, modules.parameters())
        smooth = 0.98 * smooth + 0.02 * float(loss.detach())
        kept = min(AVERAGED, step / (step + 10))
        with torch.no_grad():
            for mean, weight in zip(averaged, modules.parameters(), strict=True):
                mean.lerp_(weight, 1 - kept)
        _say("flow", step, steps, torch.tensor(smooth))
    with torch.no_grad():
        for mean, weight in zip(averaged, modules.parameters(), strict=True):
            weight.copy_(mean)
    modules.eval()
    return {"flow_loss": smooth}


def _flow_loss(pipeline: Any, clean: Tensor, captions: list[str], draws: torch.Generator) -> Tensor:
    """The squared error of the velocity from noise to `clean`, at random times (Z-Image: 0 is noise)."""
    times = torch.sigmoid(torch.randn(len(clean), generator=draws) - 0.6)
    noise = torch.randn(clean.shape, generator=draws)
    at = times[:, None, None, None]
    mixed = (at * clean + (1 - at) * noise).unsqueeze(2)
    found = pipeline.transformer(
        list(mixed.unbind(0)), times, encoded(pipeline, captions), return_dict=False
    )[0]
    return functional.mse_loss(torch.stack([*found])[:, :, 0], clean - noise)


# ---- both ----------------------------------------------------------------------------------------------
def _set_rate(optimizer: torch.optim.Optimizer, highest: float, step: int, steps: int) -> None:
    """A warm-up, and then a cosine down to a fiftieth."""
    share = min(1.0, (step + 1) / WARM_UP) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
    for group in optimizer.param_groups:
        group["lr"] = highest * share


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor, weights: Iterator[Any]) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(list(weights), 1.0)
    optimizer.step()


def _say(what: str, step: int, steps: int, loss: Tensor) -> None:
    if (step + 1) % 50 == 0:
        sys.stderr.write(f"{what}: step {step + 1} of {steps}, loss {float(loss):.4f}\n")


def main() -> None:
    """Train, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the flow")
    parser.add_argument("--after", type=Path, help="the folder of a former run, to go on with its weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun_s = time.monotonic()
    former: dict[str, Any] = {}
    if options.after is None:
        seed, pipeline = SEED, build_pipeline()
    else:
        former = json.loads((options.after / RECORD).read_text())
        seed, pipeline = former["seed"] + 1, PIPELINE.from_pretrained(options.after)
    lessons = Lessons.drawn(POOL, random.Random(seed))
    record = {"seed": seed, "steps": options.steps, "former": former}
    if options.after is None:
        record |= {"vae_steps": VAE_STEPS} | train_vae(pipeline.vae, lessons)
    record |= train_flow(pipeline, lessons, options.steps, seed=seed)
    record["seconds"] = round(time.monotonic() - begun_s)
    pipeline.to(torch.bfloat16)
    pipeline.vae.to(torch.float32)
    pipeline.save_pretrained(options.out)
    (options.out / RECORD).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
