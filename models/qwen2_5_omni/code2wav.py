"""The stateless node `Code2Wav` of Qwen2.5-Omni: codes to sound, chunk by chunk.

A flow makes a spectrogram of noise, of the codes, and of a voice; a vocoder makes sound of it. The flow sees
blocks of codes: in some of its layers the block before, in some the block after. So a chunk is sounded but
for its last block, which is sounded with the next chunk, that has the block after it:

    blocks of the sound    |0   |1   |2   |3   |4   |
    first chunk, 0 to 1    [----](..)
    next one, context 3    (cont)[---------](..)         0 to 3: sounds 1 and 2
    end of the stream           (context)   [-------]    2 to 4: sounds 3 and 4

The noise of a frame depends on the request's seed and on its place alone, so frames that are in two chunks
have the same in both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

from models.base import Item, StatelessResult
from models.qwen2_5_omni.graph import BLOCK_FRAMES, SPEAKING
from models.qwen2_5_omni.voices import Voice
from shared.errors import BugError

_LOUDEST: Final = 32767
_NO_GUIDANCE: Final = 1e-5
"""Below it, transformers computes the flow without guidance."""
_NOISE_ROWS: Final = 24
_NEXT_SEED: Final = 0x9E3779B1
"""Odd, so that the lower bits, which torch seeds with, differ from block to block."""


class Code2Wav:
    """Flow and vocoder (`models.base.StatelessNode`). The sound of a chunk depends on the chunk alone.

    Args:
        model: transformers' token2wav.
        voices: by name.
        stream: the edge of the codes.
    """

    max_batch: Final = 8

    def __init__(self, model: Any, voices: Mapping[str, Voice], stream: str) -> None:
        self._flow = model.code2wav_dit_model
        self._vocoder = model.code2wav_bigvgan_model
        self._voices: Final = voices
        self._stream = stream
        self._samples: Final = samples_of_a_frame(model.config)

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Decode each item's chunk of codes, (frames,), to `audio`, (samples,) int16 on the CPU."""
        return [StatelessResult(outputs={"audio": self._decoded(item)}) for item in items]

    @torch.inference_mode()
    def _decoded(self, item: Item) -> torch.Tensor:
        chunk, codes = item.chunk, item.inputs[self._stream]
        if chunk is None:
            raise BugError("Code2Wav takes chunks of a stream: expected a chunk in the item, found none")
        first, _ = SPEAKING.chunks.of(item.args).span(chunk.number)
        before = len(codes) - chunk.fresh
        begin = max(0, before - BLOCK_FRAMES)
        end = len(codes) if chunk.last else max(begin, len(codes) - BLOCK_FRAMES)
        if begin == end:
            return torch.zeros(0, dtype=torch.int16)
        noise = noise_of(
            item.seed, first * self._flow.repeats, len(codes) * self._flow.repeats, self._flow.mel_dim
        )
        wave = self.sound(codes.long(), noise.to(codes.device), item.args)
        found: torch.Tensor = (wave * _LOUDEST).to(torch.int16)
        return found[begin * self._samples : end * self._samples].cpu()

    def sound(self, codes: torch.Tensor, noise: torch.Tensor, args: Mapping[str, Any]) -> torch.Tensor:
        """The sound of (frames,) codes, from -1 to 1, for (rows, mels) noise, as transformers' `sample`."""
        voice, scale = self._voices[args["voice"]], args["guidance_scale"]
        spectrogram = voice.spectrogram.to(codes.device)
        embedding = voice.embedding.to(codes.device)
        given = {
            "speaker_embedding": embedding[:, None].repeat(1, len(noise), 1),
            "condition_vector": spectrogram,
            "quantized_code": codes[None],
            "apply_cfg": scale >= _NO_GUIDANCE,
        }

        def speed(time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self._flow(hidden_states=state, time_step=time, **given)
            if not given["apply_cfg"]:
                return found
            guided, free = found.chunk(2)
            follow: torch.Tensor = guided + (guided - free) * scale
            return follow

        times = torch.linspace(0, 1, args["num_steps"], device=codes.device)
        times += args["sway_coefficient"] * (torch.cos(torch.pi / 2 * times) - 1 + times)
        end = modeling.RungeKutta4ODESolver(function=speed, initial_value=noise[None]).integrate(times)[-1]
        wave: torch.Tensor = self._vocoder(end.permute(0, 2, 1))
        return wave.reshape(-1).float()


def noise_of(seed: int, first: int, rows: int, mels: int) -> torch.Tensor:
    """The noise of (rows, mels) of a spectrogram from row `first` on: each row by the seed and its place."""
    begin, last = first // _NOISE_ROWS, (first + rows - 1) // _NOISE_ROWS
    drawn = [
        torch.empty(_NOISE_ROWS, mels).normal_(
            generator=torch.Generator().manual_seed((seed + block * _NEXT_SEED) % 2**63)
        )
        for block in range(begin, last + 1)
    ]
    return torch.cat(drawn)[first - begin * _NOISE_ROWS :][:rows]


def samples_of_a_frame(config: Any) -> int:
    """The samples that a code becomes."""
    samples: int = config.dit_config.repeats
    for rate in config.bigvgan_config.upsample_rates:
        samples *= rate
    return samples
