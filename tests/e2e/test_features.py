"""Features of videos over the real command line: V-JEPA 2 with its predictor on a rank of its own.

The features are those of transformers' own model on the same checkpoint.
"""

import asyncio
import base64
import io
import json
import os
import signal
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from shared.events import AnyEvent, NodeReady, WalkCompleted, encode
from tests.e2e import clients
from tests.e2e.deploy import Running, serve
from tests.models.media import samples
from tests.models.vjepa2 import oracle
from tests.tiny.vjepa2 import tiny_vjepa2

pytestmark = pytest.mark.timeout(200)

MASKED: Final = {"context_mask": [*range(32)], "target_mask": [*range(40, 64)]}
REQUESTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "all": ("clip", {}),
    "masked": ("clip", MASKED),
    "encoded": ("clip", {"skip_predictor": True}),
    "other": ("other", {}),
    "short": ("short", {"num_frames": 64}),
    "picture": ("picture", {"num_frames": 4}),
}
ROLLOUTS: Final[dict[str, dict[str, Any]]] = {
    "rollout": {"rollout_horizon": 3},
    "streamed": {"rollout_horizon": 2, "stream_rollout": True},
}
HOSTILE: Final = {
    "truncated": samples.video("mp4")[:900],
    "bomb": samples.png_header(50_000, 50_000),
    "endless": samples.gif_of_pixels(1_500_000),
}


@dataclass(slots=True)
class Found:
    """The results of one deployment.

    Attributes:
        features: by request; also of those during which a rank was killed.
        refused: the errors of hostile files.
        logs: by request, its records.
        verdicts: of `dalsegno replay`, by request.
        executed: the output of `dalsegno replay --execute`.
    """

    features: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    refused: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, list[AnyEvent]] = field(default_factory=dict)
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    executed: str = ""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("features")
    path = folder / "vjepa2.yaml"
    path.write_text(
        f"model: vjepa2\ncheckpoint: {tiny_vjepa2()}\nmax_seq_len: 8192\n"
        "node_groups:\n  - node_names: [prepare, video_encoder]\n    ranks: [0]\n"
        "  - node_names: [predictor, rollout_predictor]\n    ranks: [1]\n"
    )
    with serve(folder, model=str(path)) as running:
        result = asyncio.run(ask(running))
        result.verdicts = clients.verdicts(clients.run_on(running, "replay", "--all", "--json"))
        executed = clients.run_on(running, "replay", "masked", "--execute", "--config", str(path))
        result.executed = executed.stdout + executed.stderr
    return result


async def ask(running: Running) -> Found:
    found = Found()
    async with clients.http(running) as http, clients.reader(running) as reader:
        async with asyncio.TaskGroup() as tasks:
            for name in REQUESTS:
                tasks.create_task(keep(http, found, name, *REQUESTS[name]))
        await keep(http, found, "again", *REQUESTS["masked"])
        os.kill(running.pids.worker["1"], signal.SIGSTOP)  # the step cannot end before the kill
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep(http, found, "killed", *REQUESTS["masked"]))
            await reader.until(reader.subjects.ready(1, "killed"), NodeReady)
            os.kill(running.pids.worker["1"], signal.SIGKILL)
        async with asyncio.TaskGroup() as tasks:
            for name, options in ROLLOUTS.items():
                tasks.create_task(keep(http, found, name, "clip", options))
        for name, data in HOSTILE.items():
            answer = await post(http, name, data, {})
            found.refused[name] = {"status": answer.status_code} | answer.json()
        await keep(http, found, "after", *REQUESTS["all"])
        for name in ("masked", "killed"):
            found.logs[name] = await reader.events(name)
    return found


async def keep(http: httpx.AsyncClient, found: Found, name: str, file: str, options: dict[str, Any]) -> None:
    answer = await post(http, name, oracle.FILES[file], options, tensor_format="npz")
    assert answer.status_code == 200, answer.text
    found.features[name] = features_of(answer.json())


async def post(
    http: httpx.AsyncClient, name: str, data: bytes, options: dict[str, Any], **more: str
) -> httpx.Response:
    form = {"request_id": name, "streaming": "false", "model_kwargs": json.dumps(options), **more}
    return await http.post("/generate", data=form, files={"files": (name, io.BytesIO(data))})


def features_of(document: dict[str, Any]) -> Any:
    """The tensors in a document, one after the other; each is an npz file."""
    found = []
    for value in document["outputs"]["video"]:
        with np.load(io.BytesIO(base64.b64decode(value["data"]))) as arrays:
            [name] = arrays.files
            found.append(arrays[name])
    return np.concatenate(found)


def is_close(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> bool:
    return found.shape == expected.shape and bool(
        np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_features_of_concurrent_requests_are_those_of_transformers(found: Found, name: str) -> None:
    expected = oracle.features(*REQUESTS[name])

    assert found.features[name].dtype == np.float32
    assert is_close(found.features[name], expected)


def test_features_depend_on_the_video_and_on_the_masks(found: Found) -> None:
    """Negative control: no other request's features pass for these."""
    assert not is_close(found.features["other"], oracle.features("clip", {}))
    assert not is_close(
        found.features["masked"], oracle.features("clip", {"target_mask": MASKED["target_mask"]})
    )


@pytest.mark.parametrize("name", ROLLOUTS)
def test_rollouts_are_those_of_the_published_code(found: Found, name: str) -> None:
    assert is_close(found.features[name], oracle.rollout("clip", ROLLOUTS[name]["rollout_horizon"]))


@pytest.mark.parametrize("name", ["again", "killed", "after"])
def test_features_are_the_same_again_and_after_a_rank_was_killed(found: Found, name: str) -> None:
    expected = oracle.features(*REQUESTS["all" if name == "after" else "masked"])

    assert is_close(found.features[name], expected)


def test_a_killed_rank_led_to_another_attempt(found: Found) -> None:
    attempts = {event.attempt for event in found.logs["killed"] if isinstance(event, NodeReady)}

    assert len(attempts) > 1


def test_neither_pixels_nor_features_between_nodes_are_in_the_log(found: Found) -> None:
    for event in found.logs["masked"]:
        if isinstance(event, WalkCompleted):
            handles = [handle for result in event.results for handle in result.outputs.values()]
            assert not any(handle.data for handle in handles)
    assert sum(len(encode(event)) for event in found.logs["masked"]) < 64_000


@pytest.mark.parametrize(
    ("name", "code"),
    [("truncated", "invalid_media"), ("bomb", "media_too_large"), ("endless", "media_too_large")],
)
def test_hostile_files_are_typed_errors_that_name_the_file(found: Found, name: str, code: str) -> None:
    refused = found.refused[name]

    assert refused["status"] in (400, 413)
    assert refused["error"]["code"] == code
    assert refused["error"]["message"].startswith(f"files[0] ({name!r}): expected")


def test_every_request_replays(found: Found) -> None:
    assert {*REQUESTS, *ROLLOUTS, "again", "killed", *HOSTILE} <= found.verdicts.keys()
    assert all(verdict["matches"] for verdict in found.verdicts.values()), found.verdicts


def test_a_data_replay_is_exact(found: Found) -> None:
    assert "agree exactly" in found.executed, found.executed
