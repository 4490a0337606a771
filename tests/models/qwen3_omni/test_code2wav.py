"""Chunks of sound join without gaps, and each is what transformers makes of its frames."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from models.base import ChunkOf, Item, StatelessResult
from models.qwen3_omni import nodes
from models.qwen3_omni.code2wav import Code2Wav, delay_of
from shared.errors import BugError
from shared.walks import Cutter, LeftContext
from tests.tiny import omni

STREAM = "codec_tokens"


@pytest.fixture(scope="module")
def codec() -> Code2Wav:
    loaded = nodes.load(omni.tiny_omni(), "Code2Wav")
    assert isinstance(loaded, Code2Wav)
    return loaded


def codes_of(frames: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(frames)
    return torch.randint(0, 64, (frames, omni.GROUPS), generator=drawn, dtype=torch.int32)


def chunks_of(codec: Code2Wav, codes: torch.Tensor, policy: LeftContext) -> list[Any]:
    """The sound of each chunk of codes."""
    items = [
        Item(
            inputs={STREAM: codes[chunk.start : chunk.stop]},
            args={},
            chunk=ChunkOf(number=chunk.number, fresh=chunk.fresh, last=chunk.last),
        )
        for chunk in Cutter(policy).cut(len(codes), ended=True)
    ]
    found = codec.run(items)
    assert all(isinstance(one, StatelessResult) for one in found)
    return [one.outputs["audio"].numpy() for one in found if isinstance(one, StatelessResult)]


def sound_of(codes: torch.Tensor) -> Any:
    with torch.inference_mode():
        return (omni.oracle().code2wav(codes.T[None])[0, 0].clamp(-1, 1) * 32767).to(torch.int16).numpy()


@pytest.mark.parametrize("frames", [1, 4, 11, 40])
def test_chunks_with_enough_context_are_the_sound_of_all_frames(codec: Code2Wav, frames: int) -> None:
    codes = codes_of(frames)
    joined = np.concatenate(chunks_of(codec, codes, LeftContext(8, 40, first=2)))
    whole = sound_of(codes)
    assert len(joined) == frames * 24 - 15 == len(whole)
    np.testing.assert_allclose(joined, whole, atol=2)


def test_each_chunk_is_bit_for_bit_that_of_transformers_and_the_samples_which_it_drops(
    codec: Code2Wav,
) -> None:
    codes, count, context = codes_of(30), 8, 5
    chunks = chunks_of(codec, codes, LeftContext(count, context))
    with torch.inference_mode():
        theirs = omni.oracle().code2wav
        wave = type(theirs).chunked_decode(theirs, codes.T[None], chunk_size=count, left_context_size=context)
    expected = (wave[0, 0].clamp(-1, 1) * 32767).to(torch.int16).numpy()
    assert np.array_equal(np.concatenate([chunks[0], *(chunk[15:] for chunk in chunks[1:])]), expected)


def test_the_sound_of_a_chunk_does_not_depend_on_the_others_of_a_batch(codec: Code2Wav) -> None:
    codes = codes_of(30)
    together = chunks_of(codec, codes, LeftContext(8, 5))
    begins = [0, 8, 16, 24, 30]
    for number, (begin, end) in enumerate(pairwise(begins)):
        item = Item(
            inputs={STREAM: codes[max(0, begin - 5) : end]},
            args={},
            chunk=ChunkOf(number=number, fresh=end - begin, last=False),
        )
        (alone,) = codec.run([item])
        assert isinstance(alone, StatelessResult)
        assert np.array_equal(alone.outputs["audio"].numpy(), together[number])


def test_a_stream_that_ended_adds_no_sound_and_a_call_without_a_chunk_is_refused(codec: Code2Wav) -> None:
    assert chunks_of(codec, codes_of(8), LeftContext(8, 5))[1].shape == (0,)
    with pytest.raises(BugError, match="chunks of a stream"):
        codec.run([Item(inputs={STREAM: codes_of(1)}, args={})])


def test_the_published_decoder_looks_555_samples_ahead() -> None:
    assert delay_of([8, 5, 4, 3]) == 555
    assert delay_of([4, 3]) == 15
