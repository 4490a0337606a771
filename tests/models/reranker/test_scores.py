"""Scores are those of `CrossEncoder.predict`, and of Qwen3-Reranker's published example."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from models.reranker.pairs import longest_first
from models.reranker.scorers import CrossScorer
from shared.errors import ClientError
from shared.events import Params
from tests.models.reranker.harness import QUERY, TEXTS, Reranker, judged, predicted, reranker, some_texts
from tests.tiny.rerankers import CROSS_ENCODERS, MAX_TOKENS, tiny_cross_encoder, tiny_judge


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_scores_are_those_of_sentence_transformers(name: str) -> None:
    folder = tiny_cross_encoder(name)

    found = reranker(folder).score(QUERY, TEXTS)

    assert found == pytest.approx(predicted(folder, QUERY, TEXTS, batch_size=1), abs=2e-5)
    assert np.ptp(found) > 0.02, "the control: they depend on the texts"
    assert found.dtype == np.float32


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_raw_scores_have_no_activation(name: str) -> None:
    folder = tiny_cross_encoder(name)
    identity: Any = torch.nn.Identity()

    found = reranker(folder).score(QUERY, TEXTS, use_activation=False)

    assert found == pytest.approx(
        predicted(folder, QUERY, TEXTS, batch_size=1, activation_fn=identity), abs=1e-4
    )


def test_which_classes_are_packed() -> None:
    packed = {name: _scorer(name).is_packed for name in CROSS_ENCODERS}

    assert packed == {name: name != "albert" for name in CROSS_ENCODERS}


def _scorer(name: str) -> CrossScorer:
    scorer = reranker(tiny_cross_encoder(name)).node.scorer
    assert isinstance(scorer, CrossScorer)
    return scorer


def test_the_controls_show() -> None:
    folder = tiny_cross_encoder("bert")
    right = predicted(folder, QUERY, TEXTS, batch_size=1)
    swapped = np.concatenate([predicted(folder, text, [QUERY]) for text in TEXTS])
    item = reranker(folder).item([QUERY], TEXTS)

    item.inputs["types"].zero_()
    [without_types] = reranker(folder).run(item)

    assert np.abs(swapped - right).max() > 0.01, "the text before the query"
    assert np.abs(without_types - right).max() > 0.01, "no token types"
    # Padding that is not masked: what packing avoids.
    model, short = reranker(folder).node.scorer, [2, 5, 3, 6, 3]
    padded = model.scores([short + [0] * 9], [[0, 0, 0, 1, 1] + [0] * 9])
    assert abs(float(padded - model.scores([short], [[0, 0, 0, 1, 1]]))) > 0.01, "unmasked padding"


def test_requests_of_one_batch_get_what_they_would_get_alone() -> None:
    node = reranker(tiny_cross_encoder("bert"))
    items = [
        node.item([QUERY], TEXTS),
        node.item(["a dog"], TEXTS[:1]),
        node.item(["a", "w1 w2", "the"], some_texts(4, 30, 2, seed=7), use_activation=False),
    ]

    together = node.run(*items)

    assert [len(found) for found in together] == [7, 1, 3]
    for found, item in zip(together, items, strict=True):
        assert found == pytest.approx(node.run(item)[0], abs=1e-5)
    assert node.node.cost(items[0]) == int(items[0].inputs["lengths"].sum())


def test_each_text_may_have_a_query_of_its_own() -> None:
    node = reranker(tiny_cross_encoder("bert"))

    [found] = node.run(node.item(["a", "the", "red"], TEXTS[:3]))

    alone = [node.score(query, [text])[0] for query, text in zip(("a", "the", "red"), TEXTS, strict=False)]
    assert found == pytest.approx(np.array(alone), abs=1e-5)


# ---- lengths -------------------------------------------------------------------------------------
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("lengths", [(3, 90), (90, 3), (50, 40), (29, 90), (61, 61)])
def test_pairs_are_cut_as_tokenizers_cut_them(side: str, lengths: tuple[int, int]) -> None:
    folder = tiny_cross_encoder("bert")
    query, text = some_texts(*lengths)
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    oracle.enable_truncation(MAX_TOKENS, strategy="longest_first", direction=side)
    wanted = oracle.encode(query, text)

    item = reranker(folder).item([query], [text], Params(truncation_side=side))  # type: ignore[arg-type]

    assert item.inputs["tokens"].tolist() == wanted.ids
    assert item.inputs["types"].tolist() == wanted.type_ids
    assert len(wanted.ids) == MAX_TOKENS


def test_the_longer_text_gives_way_first() -> None:
    assert longest_first(3, 4, 7) == (3, 4)
    assert longest_first(3, 9, 7) == (3, 4)
    assert longest_first(9, 3, 7) == (4, 3)
    assert longest_first(9, 8, 7) == (4, 3)
    assert longest_first(8, 9, 7) == (3, 4)


def test_requests_limit_texts_and_pairs() -> None:
    node = reranker(tiny_cross_encoder("bert"))
    text = some_texts(40)[0]
    words = text.split()

    of_text = node.item([QUERY], [text], Params(max_tokens_per_doc=5))
    of_pair = node.item([QUERY], [text], Params(truncate_prompt_tokens=10))

    assert (
        of_text.inputs["tokens"].tolist()
        == node.item([QUERY], [" ".join(words[:5])]).inputs["tokens"].tolist()
    )
    assert of_pair.inputs["lengths"].tolist() == [10]
    with pytest.raises(ClientError, match="expected at most the model's 64 tokens, found 65"):
        node.item([QUERY], [text], Params(truncate_prompt_tokens=65))
    with pytest.raises(ClientError, match="expected at least 5"):
        node.item([QUERY], [text], Params(truncate_prompt_tokens=3))


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_the_default_prompt_of_a_folder_is_put_before_the_query(name: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 - seconds

    folder = tmp_path / name
    prompts = {"search": "dog mat : ", "other": "w3 "}
    CrossEncoder(
        str(tiny_cross_encoder(name)), prompts=prompts, default_prompt_name="search", device="cpu"
    ).save(str(folder))
    node = Reranker(folder)

    found = node.score(QUERY, TEXTS)

    assert found == pytest.approx(predicted(folder, QUERY, TEXTS, batch_size=1), abs=2e-5)
    assert np.abs(found - reranker(tiny_cross_encoder(name)).score(QUERY, TEXTS)).max() > 0.005
    cut = node.score(QUERY, TEXTS, Params(truncate_prompt_tokens=12))
    assert cut == pytest.approx(
        predicted(folder, QUERY, TEXTS, batch_size=1, processing_kwargs={"text": {"max_length": 12}}),
        abs=2e-5,
    )


# ---- Qwen3-Reranker ------------------------------------------------------------------------------
def test_a_judge_scores_as_published() -> None:
    folder = tiny_judge()

    found = reranker(folder).score(QUERY, TEXTS)

    assert found == pytest.approx(judged(folder, QUERY, TEXTS), abs=2e-5)
    assert np.ptp(found) > 0.02, "the control: they depend on the texts"


def test_a_judge_takes_instructions_and_cuts_the_middle() -> None:
    folder = tiny_judge()
    task = "Find a text on cats"

    asked = reranker(folder).score(QUERY, TEXTS, instruction=task)
    cut = reranker(folder).score(QUERY, TEXTS, Params(truncate_prompt_tokens=320))

    assert asked == pytest.approx(judged(folder, QUERY, TEXTS, task=task), abs=2e-5)
    assert cut == pytest.approx(judged(folder, QUERY, TEXTS, room=320), abs=2e-5)
    assert np.abs(asked - cut).max() > 0.001
    of_text = reranker(folder).score(QUERY, ["a cat on the mat"], Params(max_tokens_per_doc=5))
    assert of_text == pytest.approx(judged(folder, QUERY, ["a cat"]), abs=2e-5)


def test_a_shorter_context_of_the_deployment_cuts_pairs() -> None:
    node = Reranker(tiny_cross_encoder("bert"), max_seq_len=12)

    assert node.item([QUERY], TEXTS[4:5]).inputs["lengths"].tolist() == [12]
