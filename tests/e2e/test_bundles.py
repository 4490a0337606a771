"""A bundle of a served request: replayed elsewhere, executed again, forked, submitted again."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import nats
import nats.errors
import nats.js.errors
import pytest

from dalsegno.bundle import bundle_file
from dalsegno.config import environment
from shared.events import OutputChunk, RequestSubmitted, decode, encode
from tests.e2e import clients
from tests.e2e.clients import Ended
from tests.e2e.deploy import Running
from tests.tiny import tiny_checkpoint

NOWHERE = {environment.DATA_DIR: "", "PATH": "/nowhere"}
"""An environment that knows no deployment, and no nats-server."""


def dalsegno(running: Running, *args: str) -> Ended:
    return clients.run(*args, "--data-dir", str(running.data_dir))


def elsewhere(folder: Path, *args: str) -> Ended:
    return clients.run(*args, env=NOWHERE, cwd=folder)


def told(ended: Ended, status: int = 0) -> str:
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout


def ask(running: Running, request_id: str, **asked: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": "Return the", "max_tokens": 12, "request_id": request_id} | asked
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=clients.PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def taken(deployment: Running, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles of two requests of one deployment."""
    folder = tmp_path_factory.mktemp("taken")
    ask(deployment, "taken", temperature=0, logprobs=1)
    ask(deployment, "several", n=3, temperature=0.9, seed=4)
    for name in ("taken", "several"):
        told(dalsegno(deployment, "export", name, "-o", str(folder / f"{name}.bundle")))
    return folder


# ---- control -----------------------------------------------------------------------------------------------


def test_a_bundle_is_replayed_where_nothing_else_is(taken: Path) -> None:
    found = told(elsewhere(taken, "replay", "taken.bundle"))
    assert "taken.bundle: taken: finished: all 3 decisions match (control replay of " in found


def test_the_parts_of_a_question_are_in_one_bundle(taken: Path) -> None:
    found = [
        json.loads(line) for line in told(elsewhere(taken, "replay", "several.bundle", "--json")).splitlines()
    ]
    assert [one["request_id"] for one in found] == ["several", "several-1", "several-2"]
    assert all(one["matches"] for one in found)


def test_a_folder_of_bundles_is_replayed_at_once(taken: Path) -> None:
    assert "4 of 4 requests match; " in told(elsewhere(taken, "replay", str(taken)))


def test_the_configuration_that_was_in_force_is_in_the_bundle(taken: Path) -> None:
    header = bundle_file.read(str(taken / "taken.bundle")).header
    [known] = header.configs.values()
    assert (known["name"], known["model"]) == ("demo", "decoder_lm")
    assert known["scheduling"]["max_waiting"] == 4096
    assert known["gateway"].keys() & {"port", "api_keys"} == {"port"}


def test_a_redacted_bundle_says_nothing_and_matches(deployment: Running, tmp_path: Path) -> None:
    ask(deployment, "private", prompt="a secret between us", temperature=0, stop=["secret stop"])
    told(dalsegno(deployment, "export", "private", "--redact", "-o", str(tmp_path / "private.bundle")))
    assert b"secret" not in (tmp_path / "private.bundle").read_bytes()
    assert "private: finished: all 3 decisions match" in told(elsewhere(tmp_path, "replay", "private.bundle"))


def test_a_bundle_of_a_request_that_is_not_there_is_not_made(deployment: Running, tmp_path: Path) -> None:
    ended = clients.run("export", "nobody", "--data-dir", str(deployment.data_dir), cwd=tmp_path)
    assert "the log holds no submission of request 'nobody'" in told(ended, 1) + ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_a_bundle_is_for_its_owner_alone(taken: Path) -> None:
    assert (taken / "taken.bundle").stat().st_mode & 0o077 == 0


def test_the_newest_requests_of_a_log(deployment: Running, taken: Path) -> None:
    found = told(dalsegno(deployment, "replay", "--all", "--last", "2", "--json"))
    assert len(found.splitlines()) == 2


# ---- nothing is published ------------------------------------------------------------------------------


async def test_the_server_lets_a_reader_publish_nothing(deployment: Running) -> None:
    """The credentials of `dalsegno replay` do not allow it to publish."""
    refused: list[str] = []

    async def on_error(error: Exception) -> None:
        refused.append(str(error))

    shown = deployment.reader
    reader = await nats.connect(
        deployment.nats_url,
        user=shown.user,
        password=shown.password,
        error_cb=on_error,
        inbox_prefix=shown.inbox_prefix,
    )
    try:
        event = encode(RequestSubmitted(model="demo", inputs={"text": "x"}))  # type: ignore[arg-type]
        subjects = [
            f"{deployment.prefix}.{kind}" for kind in ("request.r", "control.r", "walk.r", "conductor.epoch")
        ]
        for subject in subjects:
            with pytest.raises((nats.errors.TimeoutError, nats.js.errors.NoStreamResponseError)):
                await reader.jetstream().publish(subject, event, timeout=0.2)
        assert [s for s in subjects if not any(f'to "{s}"' in r.lower() for r in refused)] == []
    finally:
        await reader.close()


# ---- forks ---------------------------------------------------------------------------------------------


def test_a_fork_is_a_new_request_and_the_old_one_stays_as_it_was(deployment: Running, taken: Path) -> None:
    before = told(dalsegno(deployment, "log", "taken", "--json"))
    asked = ("--fork-at", "request.submitted", "--set", "max_tokens=5", "--wait", "--json")
    found = told(dalsegno(deployment, "replay", "taken", *asked))
    fork = json.loads(found)
    assert fork["forked_from"]["request_id"] == "taken"
    assert fork["forked_from"]["changes"] == {"max_tokens": 5}
    assert fork["compared"]["after"]["completion_tokens"] == fork["compared"]["same_tokens"] == 5
    assert told(dalsegno(deployment, "log", "taken", "--json")) == before
    assert "all 3 decisions match" in told(dalsegno(deployment, "replay", fork["request_id"]))


def test_a_fork_in_the_answer_goes_on_as_the_answer_did(deployment: Running, taken: Path) -> None:
    path = str(taken / "taken.bundle")
    found = told(dalsegno(deployment, "replay", path, "--fork-at", "output.chunk", "--wait"))
    assert found.splitlines()[-1] == "  both are the same"


def test_a_fork_that_is_not_waited_for_is_found_in_the_log(deployment: Running, taken: Path) -> None:
    found = told(
        dalsegno(deployment, "replay", "several", "--fork-at", "several-1.admitted", "--id", "chosen")
    )
    assert found.splitlines()[0].startswith("chosen: forked from several-1 at record ")
    again = dalsegno(deployment, "replay", "several", "--fork-at", "several-1.admitted", "--id", "chosen")
    assert "request_id 'chosen' is taken; choose another" in told(again, 1) + again.stderr


# ---- load ----------------------------------------------------------------------------------------------


def test_what_came_is_asked_again_as_it_came(deployment: Running, taken: Path) -> None:
    found = json.loads(
        told(clients.run("replay", str(taken), "--load", str(deployment.data_dir), "--speed", "50", "--json"))
    )
    assert found["level"] == "load"
    assert found["recorded"]["finished"] == found["now"]["finished"] == 4
    assert found["recorded"]["tokens"] == found["now"]["tokens"]
    assert {one["request_id"] for one in found["requests"]} == {"taken", "several", "several-1", "several-2"}


# ---- data ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def varied(random_deployment: Running, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of an answer of random weights: any other token would be as likely."""
    path = tmp_path_factory.mktemp("varied") / "varied.bundle"
    model = httpx.get(f"{random_deployment.url}/v1/models").json()["data"][0]["id"]
    asked = {"model": model, "prompt": "abc", "max_tokens": 24, "temperature": 1.1, "ignore_eos": True}
    ask(random_deployment, "varied", **asked, seed=5, logprobs=2)
    told(dalsegno(random_deployment, "export", "varied", "-o", str(path)))
    return path


def executed(path: Path, *args: str, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        told(clients.run("replay", str(path), "--execute", "--json", *args), status)
    )
    assert found["level"] == "data"
    return found


def test_the_nodes_run_again_give_what_they_gave(varied: Path) -> None:
    found = executed(varied, "--tolerance", "1e-3")  # the batch may have been another one
    assert found["agrees"]
    compared = {edge["name"]: edge["compared"] for edge in found["edges"]}
    assert compared["tokens"] == compared["log probabilities"] == 24
    assert compared["step 0, prepare: tensor token_ids"] == 12


def test_a_token_that_the_model_does_not_say_is_named(varied: Path, tmp_path: Path) -> None:
    """An altered log or a wrong kernel: the log alone cannot distinguish them."""
    found = bundle_file.read(str(varied))
    place = next(n for n, one in enumerate(found.kept) if b"output.chunk" in one.record.data)
    record = found.kept[place].record
    chunk = decode(record.data)
    assert isinstance(chunk, OutputChunk)
    [was, *rest] = chunk.token_ids
    wrong = msgspec.structs.replace(chunk, token_ids=[was ^ 1, *rest])
    found.kept[place] = bundle_file.BundledRecord(
        record=msgspec.structs.replace(record, data=encode(wrong)), digest=None, left_out=None
    )
    file = io.BytesIO()
    bundle_file.write(file, found.header, found.kept)
    (tmp_path / "wrong.bundle").write_bytes(file.getvalue())

    seen = executed(tmp_path / "wrong.bundle", "--tolerance", "1e-3", status=1)
    assert seen["first_divergence"] == "tokens"
    assert seen["edges"][2]["diverges"].startswith(
        f"at token {chunk.token_offset}: recorded {was ^ 1}, found {was}"
    )
    assert len(seen["forced"]) >= 2, "the tokens after it are compared for the altered text"


def test_another_checkpoint_is_seen_to_be_another(varied: Path) -> None:
    found = executed(varied, "--config", str(tiny_checkpoint("llama")), status=1)
    assert not found["agrees"]


async def test_a_model_that_cannot_be_loaded_is_one_line(varied: Path, tmp_path: Path) -> None:
    ended = await asyncio.to_thread(
        clients.run, "replay", str(varied), "--execute", "--config", str(tmp_path)
    )
    assert told(ended, 1) == ""
    assert len(ended.stderr.strip().splitlines()) == 1
