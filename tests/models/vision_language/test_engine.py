"""Chats with images in the KV engine: greedy tokens are those of transformers' `generate`."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from models.sequence_request import PromptPart
from shared.errors import WorkerError
from shared.tensors import read_ids
from tests.models.vision_language.oracle import FAMILIES, Picture, assistant, loaded, picture, user
from tests.tiny.vision import VisionFamily, tiny_vision_checkpoint
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.oracle import ids, run
from workers.data_plane.arrays import to_array
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.sequence_spec import SequenceSpec

NEW_TOKENS = 12
PICTURES = [picture(0, 40, 60), picture(1, 90, 30)]
CHATS: dict[str, tuple[list[dict[str, Any]], list[Picture]]] = {
    "text": ([user("Hello there.")], []),
    "image": ([user(0, "What is it?")], PICTURES[:1]),
    "images": ([user("First", 0, " second", 1, "\nwhich?")], PICTURES),
    "turns": ([user(0, "What?"), assistant("A dog."), user("And now?", 1)], PICTURES),
}


def spec(family: VisionFamily, name: str, key: str = "", **more: Any) -> SequenceSpec:
    """A chat as the walk of a plan starts it."""
    messages, pictures = CHATS[name]
    return asked(family, key or name, messages, pictures, **more)


def asked(
    family: VisionFamily, key: str, messages: list[dict[str, Any]], pictures: list[Picture], **more: Any
) -> SequenceSpec:
    vlm = loaded(family)
    prepared = vlm.prepared(messages, pictures)
    prompt_ids = read_ids(prepared.handle("token_ids"))
    if not pictures:
        return SequenceSpec(key=key, prompt_ids=prompt_ids, max_tokens=NEW_TOKENS, **more)
    parts = msgspec.convert(prepared.facts["parts"], list[PromptPart])
    rows = vlm.rows(prepared)
    return SequenceSpec(
        key=key, prompt_ids=prompt_ids, max_tokens=NEW_TOKENS, parts=parts, embeds=to_array(rows), **more
    )


def expected(family: VisionFamily, name: str, tokens: int = NEW_TOKENS) -> list[int]:
    messages, pictures = CHATS[name]
    vlm = loaded(family)
    return vlm.generated(vlm.reference(messages, pictures), tokens)


def engine(family: VisionFamily, **settings: Any) -> KVEngine:
    sizes = {"num_blocks": 128, "block_size": 8, "max_step_tokens": 200, "max_sequences": 4}
    return make_engine(loaded(family).nodes.load(tiny_vision_checkpoint(family), "llm"), **(sizes | settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_staggered_mixed_chats_answer_as_generate_does(family: VisionFamily) -> None:
    """Nine tokens a step: prompts are cut within images, next to decodes of others."""
    found = run(engine(family, max_step_tokens=9), [spec(family, name) for name in CHATS], every=3)

    assert {name: ids(found[name]) for name in CHATS} == {name: expected(family, name) for name in CHATS}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_another_image_give_another_answer(family: VisionFamily) -> None:
    """Negative control: with the rows in the wrong order the comparison above would fail."""
    right = spec(family, "images")
    rows = loaded(family).rows(loaded(family).prepared(*CHATS["images"]))
    wrong = replace(right, embeds=to_array(rows.flip(0)))

    found = run(engine(family), [wrong])

    assert ids(found["images"]) != expected(family, "images")


@pytest.mark.parametrize("family", ["llava", "pixtral"])
def test_the_prefix_of_an_image_is_reused_in_the_next_turn(family: VisionFamily) -> None:
    serving = engine(family)
    run(serving, [spec(family, "image")])
    before = serving.stats().cache.hits
    messages = [user(0, "What is it?"), assistant("A cat."), user("Really?")]
    vlm = loaded(family)

    found = run(serving, [asked(family, "next", messages, PICTURES[:1])])

    assert ids(found["next"]) == vlm.generated(vlm.reference(messages, PICTURES[:1]), NEW_TOKENS)
    assert serving.stats().cache.hits - before >= 16


@pytest.mark.parametrize("family", ["llava", "pixtral"])
def test_another_image_under_equal_placeholders_shares_nothing_of_it(family: VisionFamily) -> None:
    serving, vlm = engine(family), loaded(family)
    messages, other = CHATS["image"][0], picture(9, 40, 60)
    first, second = asked(family, "a", messages, PICTURES[:1]), asked(family, "b", messages, [other])
    assert first.prompt_ids == second.prompt_ids
    run(serving, [first])
    before = serving.stats().cache.hits

    found = run(serving, [second])

    assert ids(found["b"]) == vlm.generated(vlm.reference(messages, [other]), NEW_TOKENS)
    assert serving.stats().cache.hits - before <= first.parts[0].start


@pytest.mark.parametrize("family", ["llava", "pixtral"])
def test_the_same_chat_again_ends_its_cached_part_within_an_image(family: VisionFamily) -> None:
    serving = engine(family)

    answers = [ids(run(serving, [spec(family, "images", key)])[key]) for key in "ab"]

    assert answers == [expected(family, "images")] * 2


def test_preempted_chats_are_computed_again_with_their_rows() -> None:
    names = ("images", "turns", "image")
    small = engine("llava", num_blocks=28, max_step_tokens=40)
    longer = [replace(spec("llava", name), max_tokens=40) for name in names]

    found = run(small, longer)

    assert small.stats().cache.preemptions > 0
    assert [ids(found[name]) for name in names] == [expected("llava", name, 40) for name in names]


def test_a_resumed_chat_continues_as_if_nothing_had_happened() -> None:
    answer = expected("llava", "images")

    found = run(engine("llava"), [spec("llava", "images", prefix_ids=answer[:5])])

    assert ids(found["images"]) == answer[5:]


def test_a_generated_placeholder_is_an_ordinary_token() -> None:
    vlm = loaded("llava")
    right = spec("llava", "image")
    placeholder = right.prompt_ids[right.parts[0].start]

    found = run(engine("llava"), [replace(right, prefix_ids=[placeholder], max_tokens=4)])

    answer = vlm.continued(vlm.reference(*CHATS["image"]), [placeholder], tokens=3)
    assert ids(found["image"]) == answer


def test_rows_for_which_there_is_no_memory_fail_their_chat_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError("no room for 4 GB")

    serving = engine("llava")
    monkeypatch.setattr("workers.kv_engine.engine.prompt_parts_of", no_memory)
    with pytest.raises(WorkerError, match="MemoryError: no room for 4 GB"):
        serving.add(spec("llava", "image"))
    monkeypatch.undo()

    assert ids(run(serving, [spec("llava", "text")])["text"]) == expected("llava", "text")
