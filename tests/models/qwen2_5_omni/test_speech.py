"""A thinker, its talker and their sound are those of transformers' `generate`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from models.qwen2_5_omni import talker
from models.qwen2_5_omni.speech_prompts import SpeechPrompts
from models.qwen2_5_omni.thinker import Thinker
from shared.events import OutputChunk, WalkCompleted
from tests.models.omni.media import film, picture, sound
from tests.models.omni.serving import NODES, Asked, released
from tests.models.qwen2_5_omni import serving
from tests.models.qwen2_5_omni.serving import SERVED
from tests.tiny import qwen2_5_omni as tiny
from tests.workers.cluster import Cluster
from tests.workers.harness import SUBJECTS, fence

TOGETHER = dict.fromkeys(NODES, 0)
THREE = {**TOGETHER, "Thinker": 1, "Talker": 2}
STEPS = {"token2wav_num_steps": tiny.STEPS}
asking = Asked("hello there", voice="Chelsie", frames=22)
ASKED = (
    asking,
    replace(asking, voice="ethan"),
    replace(asking, text="what is it?", media=(picture(1),)),
    replace(asking, text="what is it?", media=(picture(2),), voice="Ethan", penalty=1.3),
    replace(asking, text="what is it?", media=(sound(1),)),
    replace(asking, text="what is it?", media=(sound(2), picture(1), sound(3, 2.3))),
    replace(asking, text="what is it?", media=(film(1), picture(2))),
    replace(asking, text="what is it?", media=(picture(2), film(1, 24), sound(1)), track=sound(4, 5.3)),
    replace(asking, text="what is it?", media=(film(3, 24), picture(1)), track=sound(5, 3.7)),
    replace(asking, text="what is it?", media=(film(2), picture(1), sound(1)), fps=4),
    replace(asking, text="print it", penalty=1.5),
)


@cache
def reference(asked: Asked) -> tiny.Spoken:
    return serving.reference(replace(asked, voice=asked.voice.capitalize()))


def heard(cluster: Cluster, name: str) -> Any:
    return np.frombuffer(released(cluster, name, "audio"), "<i2").astype(int)


def samples(wave: torch.Tensor) -> Any:
    return (wave * 32767).to(torch.int16).numpy().astype(int)


def check(cluster: Cluster, name: str, asked: Asked) -> None:
    wanted = reference(asked)
    assert released(cluster, name, "text").decode() == SERVED.text_of(wanted.token_ids), name
    found = heard(cluster, name)
    assert found.shape == wanted.sound.shape, name
    np.testing.assert_allclose(found, samples(wanted.sound), atol=40)


def test_the_answers_of_the_oracle_vary_and_are_heard() -> None:
    said = [reference(one) for one in ASKED]
    assert len({tuple(one.codes) for one in said}) == len(said)
    assert len({tuple(one.token_ids) for one in said}) == len(said) - 1  # the voice changes no text
    assert min(len(set(one.codes)) for one in said if len(one.codes) > 4) >= 8
    assert all(0.02 < float(one.sound.std()) < 0.9 for one in said)
    assert any(len(one.codes) < asking.frames for one in said), "expected speech that ends by itself"


async def test_texts_images_and_sounds_are_understood_and_spoken_about() -> None:
    async with SERVED.serving() as cluster:
        for number, asked in enumerate(ASKED):
            orders = SERVED.order(cluster, f"r{number}", asked, TOGETHER, **STEPS)
            await cluster.until(WalkCompleted, f"r{number}", orders)
            check(cluster, f"r{number}", asked)


async def test_answers_together_on_three_ranks_are_those_of_transformers() -> None:
    async with SERVED.serving((0, 1, 2)) as cluster:
        orders = [
            SERVED.order(cluster, f"r{number}", asked, THREE, **STEPS) for number, asked in enumerate(ASKED)
        ]
        for number, asked in enumerate(ASKED):
            await cluster.until(WalkCompleted, f"r{number}", orders[number])
            check(cluster, f"r{number}", asked)


async def test_a_rank_that_is_killed_in_the_middle_of_speech_changes_nothing() -> None:
    asked = replace(ASKED[0], frames=70)
    async with SERVED.serving((0, 1, 2)) as cluster:
        orders = SERVED.order(cluster, "whole", asked, THREE, **STEPS)
        await cluster.until(WalkCompleted, "whole", orders)
        assert len(heard(cluster, "whole")) > 48 * tiny.SAMPLES, "expected several chunks"
        for rank in (0, 1, 2):
            name = f"killed{rank}"
            SERVED.order(cluster, name, asked, THREE, **STEPS)
            await cluster.until(OutputChunk, name, 1, modality="audio")
            await cluster.members[rank].die()
            await cluster.join(rank)
            cluster.put(SUBJECTS.output("g-1", name, "conductor"), fence(name, 2))
            SERVED.order(cluster, name, asked, THREE, attempt=2, **STEPS)
            await cluster.until(WalkCompleted, name, orders, attempt=2)
            for modality in ("text", "audio"):
                assert released(cluster, name, modality) == released(cluster, "whole", modality)


# ---- negative controls -----------------------------------------------------------------------------


def _in_a_row(_self: object, prompt_ids: Sequence[int], _parts: object) -> tuple[torch.Tensor, int]:
    count = len(prompt_ids)
    return torch.arange(count, dtype=torch.int32).repeat(3, 1), count


async def answered(asked: Asked) -> tuple[str, Any]:
    async with SERVED.serving() as cluster:
        orders = SERVED.order(cluster, "wrong", asked, TOGETHER, **STEPS)
        await cluster.until(WalkCompleted, "wrong", orders)
        return released(cluster, "wrong", "text").decode(), heard(cluster, "wrong")


async def test_text_differs_with_wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thinker, "positions", _in_a_row)
    text, _ = await answered(ASKED[2])
    assert text != SERVED.text_of(reference(ASKED[2]).token_ids)


def _embeddings_alone(items: torch.Tensor) -> torch.Tensor:
    return torch.stack([items[:, 0], torch.zeros_like(items[:, 1])], dim=1)


async def test_speech_differs_without_the_states_of_the_thinker(monkeypatch: pytest.MonkeyPatch) -> None:
    right = talker.Talker.prompt_rows

    def wrong(self: Any, ids: torch.Tensor, items: torch.Tensor, args: Any) -> torch.Tensor:
        return right(self, ids, _embeddings_alone(items), args)

    monkeypatch.setattr(talker.Talker, "prompt_rows", wrong)
    text, sound = await answered(ASKED[0])
    wanted = reference(ASKED[0])
    assert text == SERVED.text_of(wanted.token_ids)
    assert sound.shape != wanted.sound.shape or np.abs(sound - samples(wanted.sound)).max() > 1000


async def test_speech_ends_elsewhere_if_the_penalty_counts_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SpeechPrompts.of

    def wrong(self: Any, *args: Any, **given: Any) -> Any:
        speech, ids = right(self, *args, **given)
        return msgspec.structs.replace(speech, penalized_ids=[]), ids

    monkeypatch.setattr(SpeechPrompts, "of", wrong)
    _, sound = await answered(ASKED[-1])
    assert sound.shape != reference(ASKED[-1]).sound.shape


async def test_sound_differs_with_another_voice_and_with_other_noise() -> None:
    _, sound = await answered(ASKED[0])
    wanted = serving.reference(ASKED[0], noise=lambda rows: serving.noise(rows).flip(0))
    assert np.abs(sound - samples(wanted.sound)).max() > 1000
