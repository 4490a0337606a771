"""Each chunk of sound is that of transformers for its frames and noise; chunks join to the whole length."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from models.base import ChunkOf, Item, StatelessResult
from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.omni.graph import CODES, FIRST
from models.qwen2_5_omni import nodes
from models.qwen2_5_omni.code2wav import Code2Wav, noise_of
from models.qwen2_5_omni.graph import BLOCK_FRAMES, SPEAKING
from models.qwen2_5_omni.voices import read_voices
from shared.errors import BugError
from shared.walks import Cutter
from tests.tiny import qwen2_5_omni as tiny

ARGS = {
    FIRST: 24,
    "voice": "Ethan",
    "num_steps": tiny.STEPS,
    "guidance_scale": 0.5,
    "sway_coefficient": -1.0,
}
POLICY = SPEAKING.chunks.of(ARGS)


@pytest.fixture(scope="module")
def codec() -> Code2Wav:
    loaded = nodes.load(tiny.tiny_qwen2_5_omni(), "Code2Wav")
    assert isinstance(loaded, Code2Wav)
    return loaded


def codes_of(frames: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(frames)
    return torch.randint(0, 200, (frames,), generator=drawn, dtype=torch.int32)


def theirs(codes: torch.Tensor, first: int, *, guidance: float = 0.5) -> Any:
    """What transformers makes of codes, with the noise of their places from `first` on."""
    noise = noise_of(5, 2 * first, 2 * len(codes), tiny.MELS)[None]
    voice = read_voices(tiny.tiny_qwen2_5_omni())["Ethan"]
    with torch.inference_mode(), mock.patch("torch.randn", return_value=noise):
        wave = tiny.oracle().token2wav(
            codes[None].long(),
            conditioning=voice.embedding,
            reference_mel=voice.spectrogram,
            num_steps=tiny.STEPS,
            guidance_scale=guidance,
        )
    return (wave.reshape(-1) * 32767).to(torch.int16).numpy()


def sounds(codec: Code2Wav, codes: torch.Tensor, **args: Any) -> list[tuple[Any, Any]]:
    """Each chunk of the codes, and its sound."""
    found = []
    for chunk in Cutter(POLICY).cut(len(codes), ended=True):
        item = Item(
            inputs={CODES: codes[chunk.start : chunk.stop]},
            args={**ARGS, **args},
            seed=5,
            chunk=ChunkOf(number=chunk.number, fresh=chunk.fresh, last=chunk.last),
        )
        (result,) = codec.run([item])
        assert isinstance(result, StatelessResult)
        found.append((chunk, result.outputs["audio"].numpy()))
    return found


@pytest.mark.parametrize("frames", [1, 11, 24, 30, 71, 130])
def test_each_chunk_is_a_slice_of_what_transformers_makes_of_its_frames(codec: Code2Wav, frames: int) -> None:
    codes, heard = codes_of(frames), 0
    for chunk, sound in sounds(codec, codes):
        whole = theirs(codes[chunk.start : chunk.stop], chunk.start)
        end = chunk.stop if chunk.last else chunk.stop - BLOCK_FRAMES
        begin = (heard - chunk.start) * tiny.SAMPLES
        assert np.array_equal(sound, whole[begin : (end - chunk.start) * tiny.SAMPLES])
        heard = end
    assert heard == frames


def test_speech_of_one_chunk_is_that_of_transformers_for_all_codes(codec: Code2Wav) -> None:
    codes = codes_of(22)
    joined = np.concatenate([sound for _, sound in sounds(codec, codes)])
    assert np.array_equal(joined, theirs(codes, 0))


@pytest.mark.parametrize("frames", [24, 80])
def test_without_guidance_too(codec: Code2Wav, frames: int) -> None:
    codes = codes_of(frames)
    (chunk, sound), *_ = sounds(codec, codes, guidance_scale=0.0)
    whole = theirs(codes[chunk.start : chunk.stop], 0, guidance=0.0)
    assert np.array_equal(sound, whole[: len(sound)])
    assert not np.array_equal(whole, theirs(codes[chunk.start : chunk.stop], 0))


def test_the_noise_of_a_row_depends_on_its_place_and_on_the_seed_alone() -> None:
    whole = noise_of(5, 0, 200, 3)
    for begin, end in pairwise((0, 7, 48, 49, 120, 200)):
        assert torch.equal(noise_of(5, begin, end - begin, 3), whole[begin:end])
    assert not torch.equal(noise_of(6, 0, 200, 3), whole)
    assert len({tuple(row) for row in whole.tolist()}) == len(whole)


def test_sound_differs_with_shifted_codes_and_with_another_voice(codec: Code2Wav) -> None:
    codes = codes_of(24)

    def joined(codes: torch.Tensor, **args: Any) -> Any:
        return np.concatenate([sound for _, sound in sounds(codec, codes, **args)]).astype(int)

    right = joined(codes)
    assert np.abs(right - joined(codes.roll(1))).max() > 1000
    assert np.abs(right - joined(codes, voice="Chelsie")).max() > 1000


def test_speech_of_no_code_is_silent_and_a_call_without_a_chunk_is_refused(codec: Code2Wav) -> None:
    assert [len(sound) for _, sound in sounds(codec, codes_of(0))] == [0]
    with pytest.raises(BugError, match="chunks of a stream"):
        codec.run([Item(inputs={CODES: codes_of(1)}, args=ARGS)])


def linked(folder: Path, without: Sequence[str]) -> Path:
    folder.mkdir()
    for path in tiny.tiny_qwen2_5_omni().iterdir():
        if path.name not in without:
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("content", [None, b"no pickle", {}, {"Ethan": {"bos_token": 1}}, {"Ethan": 3}])
def test_damaged_voices_are_refused(tmp_path: Path, content: Any) -> None:
    folder = linked(tmp_path / "model", ["spk_dict.pt"])
    if isinstance(content, bytes):
        (folder / "spk_dict.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, folder / "spk_dict.pt")
    with pytest.raises(CheckpointError, match=r"spk_dict\.pt: expected the voices"):
        read_voices(folder)


def test_voices_with_code_are_not_run(tmp_path: Path) -> None:
    torch.save({"Ethan": {"bos_token": Path}}, tmp_path / "spk_dict.pt")
    with pytest.raises(CheckpointError, match=r"spk_dict\.pt: expected the voices"):
        read_voices(tmp_path)


def test_blocks_that_chunks_would_cut_are_refused(tmp_path: Path) -> None:
    folder = linked(tmp_path / "model", ["config.json"])
    config = (tiny.tiny_qwen2_5_omni() / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"block_size": 24', '"block_size": 20'))
    with pytest.raises(UnsupportedArchitectureError, match="blocks of 20"):
        nodes.load(folder, "Code2Wav")
