"""Each family of the kit against transformers: token ids, pixels, rows, logits, and what it claims."""

from typing import Any

import numpy as np
import pytest
import torch

from models import registry
from models.media.kinds import MediaError
from shared.errors import ClientError
from shared.tensors import read_ids
from tests.models.vision_language.oracle import FAMILIES, assistant, loaded, picture, user
from tests.tiny.vision import VisionFamily, tiny_vision_checkpoint

PICTURES = [picture(0, 40, 60), picture(1, 90, 30)]

CHATS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "text only": ([user("Hello there.")], 0),
    "an image, then text": ([user(0, "What is it?")], 1),
    "text, then an image": ([user("See:\n", 0)], 1),
    "two images": ([user("First", 0, " second", 1, "\nwhich?")], 2),
    "several turns": ([user(0, "What?"), assistant("A dog."), user("And now?", 1)], 2),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> VisionFamily:
    found: VisionFamily = request.param
    return found


def test_a_folder_is_served_by_the_family_of_its_architecture(family: VisionFamily) -> None:
    found = registry.family_of(tiny_vision_checkpoint(family))

    assert found == {"pixtral": "llava"}.get(family, family)
    assert registry.graph(found).modalities[:2] == ("text", "image")


@pytest.mark.parametrize("chat", CHATS)
def test_prompts_are_prepared_as_transformers_prepares_them(family: VisionFamily, chat: str) -> None:
    messages, count = CHATS[chat]
    vlm = loaded(family)

    prepared = vlm.prepared(messages, PICTURES[:count])

    expected = vlm.reference(messages, PICTURES[:count])
    assert read_ids(prepared.handle("token_ids")) == expected.ids
    assert prepared.facts["prompt_tokens"] == len(expected.ids)
    if count == 0:
        assert "pixels" not in prepared.outputs
        return
    rows = vlm.rows(prepared)
    features = vlm.model.model.get_image_features(**expected.tensors).pooler_output
    whole = torch.cat([one.reshape(-1, one.shape[-1]) for one in features])
    torch.testing.assert_close(rows, whole, rtol=1e-4, atol=1e-4)
    assert sum(part["count"] for part in prepared.facts["parts"]) == len(rows)


def test_spliced_embeddings_give_the_logits_of_transformers(family: VisionFamily) -> None:
    messages, _ = CHATS["two images"]
    vlm = loaded(family)
    prepared = vlm.prepared(messages, PICTURES)
    expected = vlm.reference(messages, PICTURES)
    places = [torch.arange(part["start"], part["start"] + part["count"]) for part in prepared.facts["parts"]]

    with torch.inference_mode():
        embeds = vlm.llm.splice(torch.tensor(expected.ids), vlm.rows(prepared), torch.cat(places))
        ours = vlm.model(inputs_embeds=embeds[None]).logits[0]
        theirs = vlm.model(input_ids=torch.tensor([expected.ids]), **expected.tensors).logits[0]

    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_reference_of_the_language_half_is_that_of_the_whole_model(family: VisionFamily) -> None:
    vlm, ids = loaded(family), torch.arange(5, 60)

    with torch.inference_mode():
        theirs = vlm.model(input_ids=ids[None]).logits[0]

        hidden = vlm.model.model(input_ids=ids[None]).last_hidden_state[0]
        headed = vlm.llm.head(hidden, torch.tensor([0, 54]))

    torch.testing.assert_close(vlm.llm.reference(ids), theirs)
    torch.testing.assert_close(headed, theirs[[0, 54]])
    assert vlm.llm.vocab_size == 512
    assert vlm.llm.parameters < sum(one.numel() for one in vlm.model.parameters())


def test_answers_vary_and_depend_on_the_image(family: VisionFamily) -> None:
    messages, _ = CHATS["two images"]
    vlm = loaded(family)

    answers = {
        name: vlm.generated(vlm.reference(messages, pictures), 12)
        for name, pictures in {"one": PICTURES, "other": [picture(7), picture(8)]}.items()
    }

    assert answers["one"] != answers["other"]
    assert len(set(answers["one"])) >= 6


def test_equal_images_have_equal_rows_and_others_have_others(family: VisionFamily) -> None:
    vlm = loaded(family)

    prepared = vlm.prepared([user(0, "twice", 0, "and", 1)], PICTURES)

    visuals, rows = prepared.facts["visuals"], vlm.rows(prepared)
    first, again, other = torch.split(rows, [visual["rows"] for visual in visuals])
    assert visuals[0] == visuals[1]
    assert visuals[0]["digest"] != visuals[2]["digest"]
    assert torch.equal(first, again)
    assert not torch.equal(first[: len(other)], other[: len(first)])


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 300)])
def test_extreme_pictures_are_prepared_as_transformers_prepares_them(
    family: VisionFamily, height: int, width: int
) -> None:
    vlm, pictures, messages = loaded(family), [picture(3, height, width)], [user(0, "?")]
    try:
        expected = vlm.reference(messages, pictures)
    except ValueError:
        with pytest.raises(MediaError, match=f"{width} x {height} pixels"):
            vlm.prepared(messages, pictures)
        return

    prepared = vlm.prepared(messages, pictures)

    assert read_ids(prepared.handle("token_ids")) == expected.ids
    assert np.array_equal(
        np.asarray(prepared.outputs["pixels"]), expected.tensors["pixel_values"].ravel().numpy()
    )
    assert len(vlm.rows(prepared)) == sum(visual["rows"] for visual in prepared.facts["visuals"])


def test_special_tokens_of_media_in_a_text_are_refused(family: VisionFamily) -> None:
    vlm = loaded(family)
    token = next(iter(vlm.processing._adapter.row_tokens))

    for text in (token, f"a {token} b", token * 3):
        with pytest.raises(ClientError, match="no text of the request to contain") as raised:
            vlm.prepared([user(0, text)], PICTURES[:1])
        assert raised.value.code == "media_mismatch"
