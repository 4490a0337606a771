"""Videos with their sound: the tokens of the published processors, their positions, and silent videos."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling_2_5
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling_3
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from models.media.kinds import UnsupportedMediaError
from models.omni.films import FilmTokens, has_film
from models.omni.positions import omni_positions
from models.sequence_request import PromptPart
from models.vision_language.expansion import Seen
from shared.tensors import read_ids
from tests.models.omni.media import film, picture, sound
from tests.models.omni.serving import SHELF, Asked, Served
from tests.models.qwen2_5_omni import serving as qwen2_5
from tests.models.qwen3_omni import serving as qwen3
from tests.tiny import omni, qwen2_5_omni

KINDS = ("image", "video")
FAMILIES: dict[str, tuple[Served, Any, Any, Any]] = {
    "qwen3_omni": (
        qwen3.SERVED,
        Qwen3OmniMoeProcessor,
        omni.oracle,
        modeling_3.Qwen3OmniMoePreTrainedModelForConditionalGeneration,
    ),
    "qwen2_5_omni": (
        qwen2_5.SERVED,
        Qwen2_5OmniProcessor,
        qwen2_5_omni.oracle,
        modeling_2_5.Qwen2_5OmniPreTrainedModelForConditionalGeneration,
    ),
}


def tokens_of(served: Served) -> FilmTokens:
    found: FilmTokens = served.prepares._adapter._tokens  # type: ignore[attr-defined]
    return found


def seen(rows: int, grid: tuple[int, ...], seconds: float = 0.0) -> Seen:
    return Seen(pixels=np.zeros(0, np.float32), text="", rows=rows, grid=grid, seconds=seconds)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seconds", [1.0, 2.0, 0.5, 2 / 3, 0.8])
@pytest.mark.parametrize(("planes", "sounds"), [(1, 1), (6, 30), (6, 260), (9, 151), (2, 400)])
def test_rows_stand_in_the_order_of_the_published_processor(
    family: str, seconds: float, planes: int, sounds: int
) -> None:
    served, processor, *_ = FAMILIES[family]
    tokens = tokens_of(served)
    theirs = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2),
        audio_bos_token=tokens.begin,
        audio_eos_token=tokens.end,
        audio_token=tokens.audio,
        video_token=tokens.video,
    )
    theirs.get_chunked_index = lambda *args: processor.get_chunked_index(theirs, *args)
    expected = processor.replace_video_with_audio_token(
        theirs,
        {"video_grid_thw": np.array([[planes, 4, 6]]), "video_second_per_grid": [seconds]},
        0,
        {"num_audio_tokens": [sounds]},
        0,
        position_id_per_seconds=tokens.per_second,
        seconds_per_chunk=2.0,
    )
    found = tokens.film(seen(planes * 6, (planes, 4, 6), seconds), seen(sounds, (sounds * 4,)))
    assert found.text == expected
    assert found.rows == planes * 6 + sounds


@pytest.mark.parametrize(
    ("family", "fps"),
    [("qwen3_omni", 2.0), ("qwen3_omni", 4.0), ("qwen2_5_omni", 2.0), ("qwen2_5_omni", 4.0)],
)
def test_positions_of_thinkers_are_those_of_transformers(family: str, fps: float) -> None:
    served, _, oracle, rules = FAMILIES[family]
    asked = Asked("?", (picture(1), film(1), picture(2)), track=sound(2, 2.7), outputs=("text",))
    walk: Any = next(served.graph.plan(asked.request(fps=fps)))
    result = served.prepares.run("prepare", "k", {}, walk.call().args)
    ids = read_ids(result.handle("token_ids"))
    parts = msgspec.convert(result.facts["parts"], list[PromptPart])
    assert has_film(parts)
    assert sum(part.count for part in parts) == sum(
        one["rows"] for kind in ("visuals", "sounds") for one in result.facts[kind]
    )
    assert len({part.digest for part in parts}) == len(parts)
    grids = {
        kind: [one["grid"] for one in result.facts["visuals"] if one.get("modality", "image") == kind]
        for kind in KINDS
    }
    expected, _ = oracle().thinker.model.get_rope_index(
        torch.tensor([ids]),
        torch.tensor(grids["image"]),
        torch.tensor(grids["video"]),
        torch.ones(1, len(ids)),
        True,
        torch.tensor([one["grid"][0] for one in result.facts["sounds"]]),
        torch.tensor([2 / fps]),
    )
    found, following = omni_positions(oracle().thinker.model, rules, ids, parts)
    assert torch.equal(found, expected[:, 0])
    assert following == float(expected.max()) + 1
    has_fractions = bool((expected != expected.round()).any())
    assert has_fractions == (family == "qwen3_omni" and fps == 4)
    apart, _ = omni_positions(oracle().thinker.model, rules, ids, parts, knows_films=False)
    assert not torch.equal(found, apart) or family == "qwen3_omni"  # its rule sees most films by itself


@pytest.mark.parametrize("family", FAMILIES)
def test_a_silent_video_is_refused_if_it_is_to_be_heard(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        raise UnsupportedMediaError("expected audio, found a file without an audio stream")

    monkeypatch.setattr(SHELF, "audio", silent)
    served = FAMILIES[family][0]
    with pytest.raises(
        UnsupportedMediaError, match=r"use_audio_in_video: .* leave it out for a silent video"
    ):
        served.prompt_of(Asked("?", (film(1),), track=sound(1)))
