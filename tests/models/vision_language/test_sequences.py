"""Chats with images that continue in another engine, in recorded steps, and with drafts: the same answers.

The families are those with positions of several axes, and with images whose tokens see one another.
"""

from dataclasses import replace

import pytest

from shared.errors import BugError
from tests.models.vision_language.axes_oracle import served
from tests.models.vision_language.test_axes_families import NEW_TOKENS, PLAIN, engine, expected
from tests.tiny.vision_axes import AxesFamily
from tests.workers.kv_engine.oracle import ids, prompts, run
from tests.workers.kv_engine.recorder import Again
from tests.workers.kv_engine.test_kv_transfer import EXPORT, Slots
from workers.data_plane.arrays import to_array
from workers.kv_engine.engine import KVEngine
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.speculative.proposer import PromptLookup

FAMILIES: tuple[AxesFamily, ...] = ("qwen2_5_vl", "gemma3", "paligemma")
LONGER = 40
"""Tokens of the text beside a chat: they need the blocks that the chat will need."""


def chat(family: AxesFamily, key: str = "images") -> SequenceSpec:
    return served(family).spec(key, *PLAIN["images"], max_tokens=NEW_TOKENS)


def handed_over(family: AxesFamily) -> SequenceSpec:
    """Return a chat whose prompt another engine has computed, without the rows of its images."""
    slots, asked = Slots(), chat(family)
    one = engine(family, export_to=slots.allocate)
    [first] = run(one, [replace(asked, max_tokens=1, export=EXPORT)])[asked.key]
    return replace(asked, prefix_ids=[first.token_id], kv=slots.read(), embeds=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_continues_in_another_engine_that_gets_no_rows(family: AxesFamily) -> None:
    given = handed_over(family)

    found = run(engine(family, block_size=5), [given])

    assert [*given.prefix_ids, *ids(found[given.key])] == expected(family, "images")


def test_without_its_parts_a_handed_over_chat_continues_at_other_positions() -> None:
    """Negative control: the keys and values alone do not tell where the answer goes on."""
    given = replace(handed_over("qwen2_5_vl"), parts=())

    found = run(engine("qwen2_5_vl"), [given])

    assert [*given.prefix_ids, *ids(found[given.key])] != expected("qwen2_5_vl", "images")


def test_a_chat_without_rows_is_not_preempted_for_want_of_blocks() -> None:
    """It arrives last, so any other sequence in its place would be preempted."""
    family: AxesFamily = "qwen2_5_vl"
    given = handed_over(family)
    texts = [
        SequenceSpec(key=str(n), prompt_ids=text, max_tokens=LONGER)
        for n, text in enumerate(prompts(2, seed=4, shortest=9, longest=9))
    ]
    blocks = -(-(len(given.prompt_ids) + NEW_TOKENS) // 4) + 8
    small = engine(family, num_blocks=blocks, block_size=4, prefix_cache=False)

    found = run(small, [*texts, given])

    assert small.stats().cache.preemptions > 0
    assert [*given.prefix_ids, *ids(found[given.key])] == expected(family, "images")


def test_a_prompt_whose_rows_did_not_come_is_refused_before_any_step() -> None:
    with pytest.raises(BugError, match="their rows did not come"):
        engine("qwen2_5_vl").add(replace(chat("qwen2_5_vl"), embeds=None))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "paligemma"])
def test_recorded_steps_give_the_same_answers(family: AxesFamily) -> None:
    again = Again()
    serving = engine(family, max_sequences=3, capture=again)

    found = run(serving, [chat(family, "a"), chat(family, "b")], every=4)

    assert [ids(found[key]) for key in "ab"] == [expected(family, "images")] * 2
    assert again.replays > 0


def ending_with_its_image(family: AxesFamily, key: str) -> SequenceSpec:
    """Return a prompt whose last token stands for its image."""
    vlm, (messages, media) = served(family), PLAIN["images"]
    asked = chat(family, key)
    image = asked.parts[0]
    rows = vlm.rows(vlm.prepared(messages, media))[: image.count]
    return replace(
        asked,
        prompt_ids=asked.prompt_ids[: image.start + image.count],
        parts=[image],
        embeds=to_array(rows),
    )


def test_a_last_token_with_a_row_is_not_replayed() -> None:
    """All before it is cached: a step of one token, as a decode is, but its embedding is the image's."""
    serving = engine("qwen2_5_vl", block_size=1, capture=Again())

    answers = [ids(run(serving, [ending_with_its_image("qwen2_5_vl", key)])[key]) for key in "ab"]

    assert answers[0] == answers[1]
    assert serving.stats().cache.hits == len(ending_with_its_image("qwen2_5_vl", "c").prompt_ids) - 1


def drafting(family: AxesFamily) -> KVEngine:
    return engine(family, proposer=PromptLookup(), speculative_tokens=4)


def test_drafts_are_verified_at_the_positions_after_an_image() -> None:
    answer = expected("qwen2_5_vl", "images")
    asked = chat("qwen2_5_vl")
    # The answer is in the prompt, too, so that drafts are found and accepted.
    served_before = replace(asked, prompt_ids=[*asked.prompt_ids, *answer, asked.prompt_ids[-1]])
    serving = drafting("qwen2_5_vl")

    found = run(serving, [served_before, replace(asked, key="plain")])

    assert ids(found["plain"]) == answer
    assert ids(found["images"]) == ids(run(engine("qwen2_5_vl"), [served_before])["images"])
    assert serving.stats().cache.drafted > 0
