"""The plan of the kit: a request without media is a language model's, one with media encodes them first."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.checks import resolve
from models import registry
from models.decoder_lm.graph import GRAPH as TEXT
from models.llava.graph import GRAPH
from shared.events import Inputs, Limits, Media, Params, WalkResult
from shared.plan_run import PlanRun
from shared.plans import Finish, PlanRequest, StepResult, Walk
from shared.tensors import Handle, inline_ids
from tests.tiny.vision import tiny_vision_checkpoint

IDS = inline_ids("p", [5, 9, 9, 7])
PIXELS = Handle(key="x", dtype="float32", shape=(12,), rank=0, incarnation=1)
PART: dict[str, Any] = {"start": 1, "count": 2, "digest": "d", "modality": "image"}
VISUAL: dict[str, Any] = {"digest": "d", "shape": (3, 2, 2), "rows": 2}
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


def journey(*, images: int = 1, output: str = "text", **params: Any) -> PlanRun:
    files = [Media(modality="image", digest=f"{number:064x}") for number in range(images)]
    return PlanRun(
        GRAPH,
        PlanRequest(
            request_id="r",
            inputs=Inputs(text="hi", files=files, output_modalities=[output]),
            params=Params(**params),
            limits=Limits(max_seq_len=16, kv_tokens=100, default_max_tokens=4),
            seed=1,
        ),
    )


def prepared(**facts: Any) -> StepResult:
    known = {"prompt_tokens": 4, "sampling": SAMPLING, "parts": [PART], "visuals": [VISUAL], **facts}
    outputs = {"token_ids": IDS, "pixels": PIXELS}
    return StepResult((WalkResult(name="prepare_media", facts=known, outputs=outputs),))


def walks(run: PlanRun, *results: StepResult) -> dict[str, Walk]:
    at_hand = run.advance([(0, result) for result in results])
    assert not isinstance(at_hand, Finish)
    (step,) = at_hand
    return {walk.name: walk for walk in step.walks}


def test_a_request_without_media_runs_the_walks_of_a_language_model() -> None:
    assert list(walks(journey(images=0))) == ["prepare"]
    for name in TEXT.walks:
        assert GRAPH.walks[name].describe() == TEXT.walks[name].describe()
        assert not {"vision_encoder"} & set(GRAPH.walks[name].nodes)


def test_media_are_encoded_in_the_walk_that_starts_the_sequence() -> None:
    run = journey()
    assert list(walks(run)) == ["prepare_media"]

    found = walks(run, prepared())

    assert list(found) == ["prefill_media", "decode"]
    assert found["prefill_media"].inputs == {"token_ids": IDS, "pixels": PIXELS}
    args = found["prefill_media"].call().args
    assert args["parts"] == [PART]
    assert args["visuals"] == [VISUAL | {"shape": [3, 2, 2]}]
    assert not {"parts", "visuals"} & found["decode"].call().args.keys()


@pytest.mark.parametrize(
    ("params", "facts"),
    [
        ({"max_tokens": 0, "echo": True}, {"prompt_text": "hi"}),
        ({"warm": True}, {}),
        ({"output": "embedding"}, {"pooling": {"mode": "lasttoken"}}),
    ],
)
def test_media_are_encoded_for_prompts_without_an_answer(params: Any, facts: Any) -> None:
    run = journey(**params)
    walks(run)

    found = walks(run, prepared(**facts))

    assert list(found) == ["score_media"]
    assert found["score_media"].call().args["parts"] == [PART]


def test_rows_are_freed_with_the_walk_that_reads_them() -> None:
    walk = GRAPH.walks["prefill_media"]

    assert walk.inputs == {("pixels", "vision_encoder"), ("token_ids", "llm")}
    assert not [output for output, _ in walk.external_outputs if output == "embeds"]


@pytest.mark.parametrize("family", ["idefics3", "internvl", "llava", "mistral3"])
def test_families_of_the_kit_have_one_plan_and_name_themselves(family: str) -> None:
    graph = registry.graph(family)

    assert graph.family == family
    assert graph.plan is GRAPH.plan
    assert graph.serves
    assert graph.repository.count("/") == 1


@pytest.mark.parametrize("stated", [None, 64])
def test_a_folder_that_does_not_state_its_length_has_the_one_of_its_class(
    tmp_path: Path, stated: int | None
) -> None:
    config = json.loads((tiny_vision_checkpoint("mistral3") / "config.json").read_text())
    del config["text_config"]["max_position_embeddings"]
    if stated is not None:
        config["text_config"]["max_position_embeddings"] = stated
    (tmp_path / "config.json").write_text(json.dumps(config))

    found = resolve(str(tmp_path))

    assert found.model == "mistral3"
    assert found.max_seq_len == (stated or 131_072)
    assert [set(group.nodes) for group in found.groups] == [{"prepare", "vision_encoder", "llm"}]
