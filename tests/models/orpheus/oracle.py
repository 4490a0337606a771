"""The oracle: tokens by transformers' `generate`, and sound by the unmodified package `snac`."""

import warnings
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from models.base import ChunkOf, Item
from models.orpheus import processing
from models.orpheus.frames import END_AUDIO, FIRST_AUDIO, LEVELS, samples_of
from models.orpheus.graph import SOUND
from models.orpheus.nodes import noise_seed
from models.orpheus.processing import STOP
from shared.events import Inputs, Params
from shared.tensors import read_ids
from shared.walks.chunks import Cutter
from tests.tiny.orpheus import tiny_orpheus


def prompt(voice: str, text: str) -> list[int]:
    """The prompt's tokens, whose correctness is tested elsewhere."""
    prepare = processing.load(tiny_orpheus(), max_seq_len=4096)
    inputs = Inputs(text=text, output_modalities=["audio"])
    result = prepare.run("prepare", "k", {}, {"inputs": inputs, "params": Params(voice=voice)})
    return read_ids(result.handle("token_ids"))


def generate(prompt_ids: list[int], max_tokens: int, *, penalty: float = 1.0) -> tuple[list[int], float]:
    """The greedy answer, and the smallest margin between the first and the second choice."""
    result = _stock_model().generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        top_p=None,
        repetition_penalty=penalty,
        eos_token_id=STOP,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([step[0].topk(2).values for step in result.scores])
    answer = [int(token) for token in result.sequences[0, len(prompt_ids) :]]
    return answer, float((best[:, 0] - best[:, 1]).min())


def firings(tokens: torch.Tensor, seed: int = 5) -> list[Item]:
    """The items of SNAC for a whole stream of audio tokens (n,)."""
    chunks = Cutter(SOUND.chunks, SOUND.after_end).cut(len(tokens), ended=True)
    return [
        Item(
            inputs={"token": tokens[chunk.start : chunk.stop]},
            args={},
            seed=seed,
            path=(chunk.number,),
            chunk=ChunkOf(number=chunk.number, fresh=chunk.fresh, last=chunk.last),
        )
        for chunk in chunks
    ]


def sound_of(item: Item) -> torch.Tensor:
    """One window by the package, which draws the same noise its own way: (samples,) int16."""
    assert item.chunk is not None
    frames = len(item.inputs["token"]) // 7
    if not frames:
        return torch.zeros(0, dtype=torch.int16)
    codes = (item.inputs["token"][: frames * 7].long() - FIRST_AUDIO).remainder(4096).view(1, frames, 7)
    package = _package()
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(noise_seed(item.seed, item.chunk.number))
        decoded: torch.Tensor = package.decode([codes[:, :, list(level)].flatten(1) for level in LEVELS])
    return (decoded[0, 0] * 32767).to(torch.int16)[samples_of(item.chunk, frames)]


def speech(answer: list[int], seed: int) -> bytes:
    """The audio of an answer: 16-bit little-endian samples."""
    tokens = torch.tensor([token for token in answer if FIRST_AUDIO <= token < END_AUDIO])
    return torch.cat([sound_of(item) for item in firings(tokens, seed)]).numpy().astype("<i2").tobytes()


@cache
def _stock_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_orpheus(), dtype=torch.float32).eval()


@cache
def _package() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from snac import SNAC  # noqa: PLC0415 - its import warns
    return SNAC.from_pretrained(str(tiny_orpheus() / "snac"))
