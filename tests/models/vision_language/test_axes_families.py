"""Qwen's, Gemma's and PaliGemma's models against transformers: ids, pixels, rows, positions, and answers.

Answers are greedy tokens of the KV engine, and of transformers' `generate` over the same prompt.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch

from models import registry
from models.checkpoints.files import CheckpointError
from models.media.kinds import MediaError, MediaTooLargeError, VideoInfo
from models.sequence_request import PromptPart
from models.vision_language.frame_options import FrameOptions
from models.vision_language.grids import VideoSettings
from shared.tensors import read_ids
from tests.models.vision_language.axes_oracle import FPS, served
from tests.models.vision_language.oracle import Picture, assistant, picture, user
from tests.tiny.vision_axes import AxesFamily, tiny_axes_checkpoint
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, run
from workers.kv_engine.engine import KVEngine

FAMILIES: tuple[AxesFamily, ...] = get_args(AxesFamily)
QWEN2: tuple[AxesFamily, ...] = ("qwen2_5_vl", "qwen2_vl")
QWEN3: tuple[AxesFamily, ...] = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
QWEN: tuple[AxesFamily, ...] = QWEN2 + QWEN3
GEMMA: tuple[AxesFamily, ...] = ("gemma3", "paligemma", "paligemma2")
NEW_TOKENS = 12
PICTURES = [picture(0, 90, 120), picture(1, 140, 80)]
CLIP = np.random.default_rng(2).integers(0, 256, (20, 60, 60, 3), dtype=np.uint8)
TAKEN: dict[AxesFamily, Sequence[int]] = dict.fromkeys(QWEN2, range(0, 20, 2)) | dict.fromkeys(
    QWEN3, (0, 2, 4, 6, 8, 11, 13, 15, 17, 19)
)
"""The frames of `CLIP` that are looked at: 2 per second of 4."""


def watching(*content: str | tuple[str, int]) -> dict[str, Any]:
    """A user's message: texts, and files with their kind."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part[0], "file": part[1]}
            for part in content
        ],
    }


Chat = tuple[list[dict[str, Any]], list[Picture]]
PLAIN: dict[str, Chat] = {
    "text": ([user("Hello there.")], []),
    "image": ([user(0, "What is it?")], PICTURES[:1]),
    "images": ([user(0, 1, "which one?")], PICTURES),
}
TURNS: dict[str, Chat] = {"turns": ([user(0, "What?"), assistant("A dog."), user("And now?", 1)], PICTURES)}
VIDEOS: dict[str, Chat] = {
    "video": ([watching(("video", 0), "What happens?")], [CLIP]),
    "all": (
        [watching("First", ("image", 1), "then", ("video", 0), "and", ("image", 2), "?")],
        [CLIP, *PICTURES],
    ),
}


def chats_of(family: AxesFamily) -> dict[str, Chat]:
    return PLAIN | ({} if family.startswith("pali") else TURNS) | (VIDEOS if family in QWEN else {})


EACH = [(family, chat) for family in FAMILIES for chat in chats_of(family)]


def generated(family: AxesFamily, chat: Chat) -> list[int]:
    vlm = served(family)
    return vlm.generated(vlm.reference(*chat, TAKEN.get(family, ())), NEW_TOKENS)


@cache
def expected(family: AxesFamily, name: str) -> list[int]:
    return generated(family, chats_of(family)[name])


def engine(family: AxesFamily, **settings: Any) -> KVEngine:
    nodes = registry.module(registry.family_of(tiny_axes_checkpoint(family)), "nodes")
    sizes = {"num_blocks": 256, "block_size": 8, "max_step_tokens": 200, "max_sequences": 4}
    return make_engine(nodes.load(tiny_axes_checkpoint(family), "llm"), **(sizes | settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_served_by_the_family_of_its_architecture(family: AxesFamily) -> None:
    found = registry.family_of(tiny_axes_checkpoint(family))

    shared = {"paligemma2": "paligemma", "qwen2_vl": "qwen2_5_vl"}
    assert found == shared.get(family, family.removesuffix("_moe"))
    assert ("video" in registry.graph(found).modalities) == (family in QWEN)


@pytest.mark.parametrize(("family", "name"), EACH)
def test_prompts_are_prepared_as_transformers_prepares_them(family: AxesFamily, name: str) -> None:
    chat, vlm = chats_of(family)[name], served(family)

    prepared = vlm.prepared(*chat)

    wanted = vlm.reference(*chat, TAKEN.get(family, ()))
    assert read_ids(prepared.handle("token_ids")) == wanted.ids
    for part in prepared.facts.get("parts", ()):
        assert part.get("full", False) == (family == "gemma3" or part["count"] == len(wanted.ids))
    kinds = [name for name in ("pixel_values", "pixel_values_videos") if name in wanted.given]
    for kind, modality in zip(kinds, ("image", "video"), strict=False):
        found = pixels_of(prepared, modality if len(kinds) > 1 else "")
        np.testing.assert_allclose(found, wanted.given[kind].ravel().numpy(), atol=1e-6)


def pixels_of(prepared: Any, modality: str) -> Any:
    """The pixels of the media of one modality, in order; of all of them if it is empty."""
    sizes = [int(np.prod(visual["shape"])) for visual in prepared.facts["visuals"]]
    pieces = np.split(prepared.outputs["pixels"], np.cumsum(sizes)[:-1])
    return np.concatenate(
        [
            piece
            for piece, visual in zip(pieces, prepared.facts["visuals"], strict=True)
            if modality in ("", visual.get("modality", "image"))
        ]
    )


@pytest.mark.parametrize("family", QWEN)
def test_positions_are_those_of_transformers(family: AxesFamily) -> None:
    vlm, chat = served(family), VIDEOS["all"]
    parts = msgspec.convert(vlm.prepared(*chat).facts["parts"], list[PromptPart])
    reference = vlm.reference(*chat, TAKEN[family])
    given = {name: value for name, value in reference.given.items() if not name.startswith("pixel")}

    found, following = vlm.llm.positions(reference.ids, parts)

    wanted, shift = vlm.model.model.get_rope_index(torch.tensor([reference.ids]), **given)
    assert torch.equal(found.long(), wanted[:, 0])
    assert following == len(reference.ids) + int(shift[0, 0])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_staggered_mixed_chats_answer_as_generate_does(family: AxesFamily) -> None:
    """Prompts are cut within images where their tokens are causal, next to decodes of others."""
    chats, vlm = chats_of(family), served(family)
    specs = [vlm.spec(name, *chat, max_tokens=NEW_TOKENS) for name, chat in chats.items()]
    longest = max((part.count for spec in specs for part in spec.parts if part.full), default=0)

    found = run(engine(family, max_step_tokens=max(9, longest)), specs, every=3)

    assert {name: ids(found[name]) for name in chats} == {name: expected(family, name) for name in chats}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_vary_and_depend_on_the_image(family: AxesFamily) -> None:
    messages, _ = PLAIN["images"]

    right = expected(family, "images")

    assert right != generated(family, (messages, [picture(7), picture(8)]))
    assert len(set(right)) >= 4


@pytest.mark.parametrize("family", GEMMA)
def test_a_causal_mask_over_an_image_gives_another_answer(family: AxesFamily) -> None:
    """Negative control: the comparisons above would fail without the masks of full parts."""
    spec = served(family).spec("k", *PLAIN["images"], max_tokens=NEW_TOKENS)
    causal = replace(spec, parts=[msgspec.structs.replace(part, full=False) for part in spec.parts])

    assert ids(run(engine(family), [causal])["k"]) != expected(family, "images")


@pytest.mark.parametrize("family", ["gemma3", "paligemma2"])
def test_the_other_rule_of_windows_gives_another_answer(family: AxesFamily) -> None:
    """Negative control: whether a window bounds an image is a rule of each model."""
    serving = engine(family)
    node: Any = serving.node
    node.full_ignores_window = not getattr(node, "full_ignores_window", False)
    spec = served(family).spec("k", *PLAIN["images"], max_tokens=NEW_TOKENS)

    assert ids(run(serving, [spec])["k"]) != expected(family, "images")


@pytest.mark.parametrize("family", QWEN)
def test_positions_of_one_axis_give_another_answer(family: AxesFamily) -> None:
    """Negative control: the comparisons above would fail without positions of three axes."""
    serving = engine(family)
    spec = served(family).spec("k", *VIDEOS["all"], max_tokens=NEW_TOKENS)
    count = len(spec.prompt_ids)
    flat = torch.arange(count, dtype=torch.int32).expand(3, -1)
    node: Any = serving.node
    node.positions = lambda *_: (flat, count)

    assert ids(run(serving, [spec])["k"]) != expected(family, "all")


@pytest.mark.parametrize("family", ["gemma3", *QWEN])
def test_the_prefix_of_an_image_is_reused_in_the_next_turn(family: AxesFamily) -> None:
    serving, vlm = engine(family), served(family)
    run(serving, [vlm.spec("first", *PLAIN["image"], max_tokens=NEW_TOKENS)])
    before = serving.stats().cache.hits
    chat = [*PLAIN["image"][0], assistant("A cat."), user("Really?")], PICTURES[:1]

    found = run(serving, [vlm.spec("next", *chat, max_tokens=NEW_TOKENS)])

    assert ids(found["next"]) == generated(family, chat)
    assert serving.stats().cache.hits - before >= 16


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_chat_again_and_another_image_answer_as_generate_does(family: AxesFamily) -> None:
    """The cache ends within an image, and equal placeholders of another image share nothing of it."""
    serving, vlm = engine(family), served(family)
    other = PLAIN["image"][0], [picture(9, 90, 120)]

    answers = [
        ids(run(serving, [vlm.spec(key, *chat, max_tokens=NEW_TOKENS)])[key])
        for key, chat in (("a", PLAIN["image"]), ("b", PLAIN["image"]), ("c", other))
    ]

    assert answers == [expected(family, "image")] * 2 + [generated(family, other)]


@pytest.mark.parametrize("family", QWEN)
def test_a_video_of_another_speed_shares_nothing_of_one_with_equal_frames(family: AxesFamily) -> None:
    vlm, messages = served(family), VIDEOS["video"][0]

    slow, fast = (vlm.prepared(messages, [CLIP], fps=fps).facts["parts"] for fps in (1.0, 2.0))

    assert {part["digest"] for part in slow}.isdisjoint(part["digest"] for part in fast)
    assert sum(part["count"] for part in slow) < sum(part["count"] for part in fast)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (600, 900), (60, 600), (20, 6000)])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_extreme_pictures_are_within_the_bounds_of_the_checkpoint(
    family: AxesFamily, height: int, width: int
) -> None:
    vlm, chat = served(family), ([user(0, "?")], [picture(3, height, width)])
    if width / height > 200:
        with pytest.raises(MediaError, match=f"{width} x {height} pixels"):
            vlm.prepared(*chat)
        return

    (part,) = vlm.prepared(*chat).facts["parts"]

    assert read_ids(vlm.prepared(*chat).handle("token_ids")) == vlm.reference(*chat).ids
    assert 4 <= part["count"] <= 12


@pytest.mark.parametrize(
    ("frames", "fps", "wanted"), [(1, 0.0, 1), (3, 30.0, 2), (300, 30.0, 12), (9, 1.0, 8)]
)
def test_the_frames_of_a_video_are_chosen_within_bounds(frames: int, fps: float, wanted: int) -> None:
    for family in QWEN:
        adapter: Any = served(family).processing._adapter
        info = VideoInfo(frames=frames, fps=fps, seconds=0.0, width=8, height=8)

        chosen = adapter._rules.choose(info, adapter._settings, fps or 24.0)

        assert len(chosen) >= min(wanted, frames)
        assert len(chosen) <= 12
        assert list(chosen) == sorted(chosen)
        assert chosen[0] == 0
        assert chosen[-1] < frames


def test_a_video_of_more_tokens_than_the_model_takes_is_refused_before_it_is_processed() -> None:
    vlm = served("qwen2_5_vl")
    adapter: Any = vlm.processing._adapter
    clip = np.zeros((20, 60, 60, 3), dtype=np.uint8)

    adapter._max_tokens, most = 19, adapter._max_tokens
    try:
        with pytest.raises(MediaTooLargeError, match="10 frames makes 20 tokens, expected at most 19"):
            vlm.prepared(VIDEOS["video"][0], [clip])
    finally:
        adapter._max_tokens = most


def test_pan_and_scan_shows_parts_of_a_wide_image() -> None:
    vlm, chat = served("gemma3"), ([user(0, "?")], [picture(3, 300, 700)])

    whole, parts = (vlm.prepared(*chat, do_pan_and_scan=asked) for asked in (False, True))

    assert [part["count"] for part in whole.facts["parts"]] == [16]
    assert [part["count"] for part in parts.facts["parts"]] == [16, 16, 16]
    assert all(part["full"] for part in parts.facts["parts"])
    assert len(vlm.rows(parts)) == 48


def test_paligemma_takes_a_single_message() -> None:
    vlm = served("paligemma")

    with pytest.raises(Exception, match="it has no turns"):
        vlm.prepared([user(0, "a"), assistant("b"), user("c")], PICTURES[:1])


def test_settings_of_videos_are_read_where_transformers_reads_them(tmp_path: Path) -> None:
    size = {"shortest_edge": 10, "longest_edge": 90}
    images, videos = tmp_path / "preprocessor_config.json", tmp_path / "video_preprocessor_config.json"

    images.write_text(json.dumps({"min_pixels": 20, "size": None, "fps": None}))
    assert VideoSettings.read(tmp_path, size=size).pixels == (20, 90)
    videos.write_text(json.dumps({"size": {"longest_edge": 50}, "fps": 1}))
    assert VideoSettings.read(tmp_path, size=size).pixels == (10, 50)
    assert VideoSettings.read(tmp_path, size=size).fps == 1
    videos.write_text(json.dumps({"max_frames": "many"}))
    with pytest.raises(CheckpointError, match="settings of its video processor"):
        VideoSettings.read(tmp_path, size=size)


def test_options_of_frames_have_bounds() -> None:
    assert msgspec.convert({"fps": 0.5, "max_frames": 8}, FrameOptions).fps == 0.5
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"fps": 0}, FrameOptions)
    assert FPS == 4.0
