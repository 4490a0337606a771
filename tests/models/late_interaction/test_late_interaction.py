"""Late interaction against sentence-transformers: vectors, scores, batches, refusals."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from msgspec import to_builtins

from configs.checks import resolve
from models import registry
from models.checkpoints.files import CheckpointError
from models.late_interaction import processing
from models.late_interaction.graph import GRAPH
from models.text_encoder.requests import TextsRequest
from shared.errors import ClientError
from shared.events import Inputs, Media, Params
from tests.models.late_interaction.harness import DOCUMENTS, QUERIES, Model, Vectors, oracle
from tests.tiny.colbert import SIZE, multi_vector_folder, pylate_folder, stanford_folder

FOLDERS: dict[str, Callable[[], Path]] = {
    "stanford": stanford_folder,
    "pylate": pylate_folder,
    "pylate-attending": lambda: pylate_folder("bert", attend_to_expansion_tokens=True, skiplist_words=["."]),
    "pylate-plain": lambda: pylate_folder("xlm-roberta", do_query_expansion=False),
    "native": lambda: multi_vector_folder(
        query_expansion={"strategy": "min", "length": 9},
        document_length=20,
        prompts={"query": "the ", "document": "a "},
        mask={"skiplist_words": [","], "skiplist_tasks": ["query", "document"]},
    ),
    "native-mean": lambda: multi_vector_folder("modernbert", query_length=8, similarity_fn_name="meanmaxsim"),
}


@cache
def folder_of(name: str) -> Path:
    return FOLDERS[name]()


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> Path:
    return folder_of(request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model(folder)


def assert_equal(found: list[Vectors], expected: list[Vectors]) -> None:
    assert [one.shape for one in found] == [one.shape for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=2e-5)


def test_vectors_are_those_of_sentence_transformers(folder: Path, model: Model) -> None:
    assert_equal(model.embed(QUERIES, task="query"), oracle(folder).encode_query(QUERIES))
    assert_equal(model.embed(DOCUMENTS), oracle(folder).encode_document(DOCUMENTS))
    assert model.embed(DOCUMENTS)[0].shape[1] == SIZE


def test_scores_are_the_max_sim_of_sentence_transformers(folder: Path, model: Model) -> None:
    queries, documents = oracle(folder).encode_query(QUERIES), oracle(folder).encode_document(DOCUMENTS)
    expected = oracle(folder).similarity(queries, documents).numpy()

    assert model.score(DOCUMENTS, QUERIES[:1]) == pytest.approx(expected[0], abs=1e-4)
    assert model.score(DOCUMENTS[:3], QUERIES) == pytest.approx(np.diagonal(expected), abs=1e-4)


def test_requests_of_one_batch_get_what_they_would_get_alone(model: Model) -> None:
    items = [
        model.item(DOCUMENTS),
        model.item(DOCUMENTS[:2], QUERIES[:1]),
        model.item(QUERIES, task="query"),
        model.item(DOCUMENTS[:3], QUERIES),
    ]

    together = model.run(*items)

    for found, item in zip(together, items, strict=True):
        [alone] = model.run(item)
        assert found.keys() == alone.keys()
        for name, value in found.items():
            assert value == pytest.approx(alone[name], abs=1e-4)


def test_mask_tokens_that_are_seen_make_other_vectors() -> None:
    seen, unseen = (
        Model(pylate_folder("bert", attend_to_expansion_tokens=attend)).embed(QUERIES[:1], task="query")[0]
        for attend in (True, False)
    )
    assert abs(seen - unseen).max() > 0.01


def test_prefix_tokens_and_the_skip_list_decide_what_the_vectors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    [expected] = Model(stanford_folder()).embed(DOCUMENTS[:1])

    with monkeypatch.context() as patch:
        patch.setattr(processing, "mark_prefixes", lambda tokenizer, marks: None)
        torn = Model(stanford_folder()).item(DOCUMENTS[:1]).inputs["tokens"].tolist()
    whole = Model(stanford_folder()).item(DOCUMENTS[:1]).inputs
    assert whole["tokens"].tolist() != torn
    assert len(whole["tokens"]) - len(expected) == 2, "a comma and an exclamation mark"


def test_documents_and_queries_are_cut() -> None:
    model = Model(stanford_folder())
    long = "cat dog " * 100

    assert len(model.embed([long])[0]) == 40
    assert len(model.embed([long], task="query")[0]) == len(model.embed(["cat"], task="query")[0]) == 12
    assert len(model.embed([long], (), Params(truncate_prompt_tokens=7))[0]) == 7
    cut = model.item([long], ["red"], Params(max_tokens_per_doc=3))
    assert cut.inputs["lengths"].tolist() == [[12, 4], [6, 6]]


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_claimed(name: str) -> None:
    assert registry.family_of(folder_of(name)) == "late_interaction"


def test_a_folder_is_served_without_a_file() -> None:
    assert resolve(str(stanford_folder())).model == "late_interaction"
    assert GRAPH.outputs == ("embedding", "score", "vectors")


def test_a_folder_without_its_projection_is_refused(tmp_path: Path) -> None:
    folder = copytree(folder_of("pylate"), tmp_path / "broken")
    (folder / "1_Dense" / "model.safetensors").unlink()

    with pytest.raises(CheckpointError, match="expected the weights of a module"):
        Model(folder)


def test_an_unknown_module_is_refused(tmp_path: Path) -> None:
    folder = copytree(folder_of("native"), tmp_path / "pooled")
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.multi_vector_encoder.modules.token_pooling.TokenPooling"
    (folder / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(CheckpointError, match="'TokenPooling' is not supported"):
        Model(folder)


@pytest.mark.parametrize(
    ("inputs", "params", "message"),
    [
        (Inputs(messages=[{"role": "user", "content": "hi"}]), Params(), "found a chat"),
        (Inputs(texts=["a"], files=[Media(modality="image", digest="0" * 64)]), Params(), "reads text only"),
        (Inputs(texts=["a"], output_modalities=["audio"]), Params(), "asked for"),
        (Inputs(texts=["a"]), Params(dimensions=4), "dimensions: expected none"),
        (Inputs(texts=["a", [4, 999]], queries=["a"]), Params(), r"texts\[1\]: token id 999"),
        (Inputs(texts=["a"], queries=[[999]]), Params(), r"queries\[0\]: token id 999"),
    ],
)
def test_what_is_no_text_to_embed_or_score_is_refused(inputs: Inputs, params: Params, message: str) -> None:
    args = to_builtins(TextsRequest(inputs=inputs, params=params))

    with pytest.raises(ClientError, match=message):
        Model(stanford_folder()).processing.run("prepare", "key", {}, args)
