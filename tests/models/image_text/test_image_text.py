"""CLIP and SigLIP against transformers' own features: texts, images, batches, the cache, refusals."""

import numpy as np
import pytest
from msgspec import to_builtins

from configs.checks import resolve
from models import registry
from models.image_text.graph import GRAPH
from models.text_encoder.requests import TextsRequest
from shared.errors import ClientError
from shared.events import Inputs, Media, Params
from tests.models.image_text.harness import IMAGES, TEXTS, Encoder, image_features, model, text_features
from tests.tiny.image_text import CONFIGS, tiny_image_text


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def encoder(name: str) -> Encoder:
    return Encoder(name)


def test_texts_have_the_features_of_transformers(name: str, encoder: Encoder) -> None:
    expected = text_features(name, TEXTS)

    assert encoder.embed(TEXTS) == pytest.approx(expected, abs=1e-5)
    assert encoder.embed(TEXTS[0]) == pytest.approx(expected[0], abs=1e-5)
    assert abs(expected[0] - expected[3]).max() > 0.05


def test_images_have_the_features_of_transformers(name: str, encoder: Encoder) -> None:
    expected = image_features(name, IMAGES)

    assert encoder.embed([], IMAGES) == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[1]).max() > 0.01


def test_rows_are_those_of_texts_and_then_of_images(name: str, encoder: Encoder) -> None:
    expected = np.concatenate([text_features(name, TEXTS[:2]), image_features(name, IMAGES[1:])])

    assert encoder.embed(TEXTS[:2], IMAGES[1:]) == pytest.approx(expected, abs=1e-5)
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert encoder.embed(TEXTS[:2], IMAGES[1:], normalize=True) == pytest.approx(unit, abs=1e-5)


def test_long_texts_are_cut_and_keep_their_end(name: str, encoder: Encoder) -> None:
    long = " ".join(["cat", "dog"] * 60)

    assert encoder.embed([long]) == pytest.approx(text_features(name, [long]), abs=1e-5)
    cut = encoder.embed([long], (), Params(truncate_prompt_tokens=5))
    words = 5 - (1 if name == "siglip" else 2)
    assert cut == pytest.approx(encoder.embed([" ".join(long.split()[:words])]), abs=1e-5)


def test_requests_of_one_batch_get_what_they_would_get_alone(encoder: Encoder) -> None:
    items = [encoder.item(TEXTS, IMAGES[:1]), encoder.item([], IMAGES), encoder.item(TEXTS[1])]

    together = encoder.run(*items)

    assert [len(found) for found in together[:2]] == [6, 3]
    for found, item in zip(together, items, strict=True):
        assert found == pytest.approx(encoder.run(item)[0], abs=1e-5)


def test_an_image_is_computed_once() -> None:
    encoder = Encoder("clip")
    first = encoder.embed([], [IMAGES[0], IMAGES[0]])
    again = encoder.embed(["a"], [IMAGES[0]])

    assert np.array_equal(first[0], again[1])
    assert encoder.node.encoder_cache.counters.misses == 1
    assert encoder.node.encoder_cache.counters.hits == 1


def test_padding_counts_for_siglip_and_not_for_clip() -> None:
    import torch  # noqa: PLC0415 - beside transformers' model

    with torch.inference_mode():
        unpadded = model("siglip").get_text_features(torch.tensor([[4, 5, 6, 1]])).pooler_output.numpy()
    found = Encoder("siglip").embed(["a red cat"])
    assert found.shape == unpadded.shape
    assert abs(found - unpadded).max() > 0.05


def test_folders_are_claimed_and_served_without_a_file(name: str) -> None:
    assert registry.family_of(tiny_image_text(name)) == "image_text"
    assert resolve(str(tiny_image_text(name))).model == "image_text"
    assert GRAPH.outputs == ("embedding",)


@pytest.mark.parametrize(
    ("inputs", "params", "message"),
    [
        (Inputs(messages=[{"role": "user", "content": "hi"}]), Params(), "found a chat"),
        (Inputs(texts=[], files=[Media(modality="video", digest="0" * 64)]), Params(), "no video"),
        (Inputs(texts=["a"], queries=["b"]), Params(), "expected no queries"),
        (Inputs(texts=["a"], output_modalities=["audio"]), Params(), "makes embeddings"),
        (Inputs(texts=["a"]), Params(dimensions=8), "expected 16"),
        (Inputs(texts=["a"]), Params(truncate_prompt_tokens=100), "at most the model's 77 tokens"),
    ],
)
def test_what_is_no_text_or_image_to_embed_is_refused(inputs: Inputs, params: Params, message: str) -> None:
    args = to_builtins(TextsRequest(inputs=inputs, params=params))

    with pytest.raises(ClientError, match=message):
        Encoder("clip").processing.run("prepare", "key", {}, args)
