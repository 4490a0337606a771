"""`/v1/batches`: the routes, by OpenAI's schema and SDK, and what each line becomes."""

import asyncio
from typing import Any

import openai
import pytest

from configs.deployment import GatewaySettings
from configs.secrets import ApiKey
from gateway.batches import results as batch_results
from shared.events import Failure, RequestSubmitted
from shared.media.store import PIECE_BYTES
from tests.gateway.batches.running import (
    CHAT,
    created,
    ended,
    jsonl,
    line,
    results,
    running,
    said,
    until_ended,
    uploaded,
)
from tests.gateway.world import Performance, deployment, echo, listening


async def test_every_line_has_its_result_in_the_order_of_the_file() -> None:
    lines = [line(f"c{number}", f"text {number}") for number in range(20)]
    async with deployment() as world, running(world):
        batch = await created(world, lines, metadata={"a": "b"})
        done = await ended(world, batch["id"])
        found = await results(world, done["output_file_id"])

    assert batch["status"] == "validating"
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert done["error_file_id"] is None
    assert done["metadata"] == {"a": "b"}
    assert done["expires_at"] == done["created_at"] + 86400
    assert [one["custom_id"] for one in found] == [f"c{number}" for number in range(20)]
    assert [said(one) for one in found] == [f"text {number}" for number in range(20)]


async def test_a_line_is_a_request_of_the_log_under_an_id_that_follows_from_the_batch() -> None:
    settings = GatewaySettings(batch_lines=2, request_timeout_s=1.0)
    async with deployment(settings=settings) as world, running(world):
        batch = await created(
            world,
            [line("odd name/1"), line("a b"), line("c", body=line("c")["body"] | {"priority": -50})],
            completion_window="2h",
        )
        await ended(world, batch["id"])
        found = [one for one in world.events("request") if isinstance(one, RequestSubmitted)]

    assert sorted(str(one.request_id) for one in found) == [f"{batch['id']}-{number}" for number in (1, 2, 3)]
    by_line = {str(one.request_id)[-1]: one for one in found}
    assert by_line["1"].correlation is None  # no valid name
    assert [by_line[number].correlation for number in "23"] == [None, "c"]
    assert {by_line[number].priority for number in "12"} == {0, -10}
    assert by_line["3"].priority == -50
    for one in found:  # the time limit of the gateway is not that of a batch
        assert 7200 <= (one.timeout_s or 0) <= 7260


async def test_broken_lines_fail_alone() -> None:
    lines: list[Any] = [
        line("good"),
        b"{",
        line("bad url", url="/v1/embeddings"),
        line("good"),
        line("bad body", body={"model": "demo"}),
        line("other model", body=line("x")["body"] | {"model": "unknown"}),
        line("better", "fine"),
    ]
    async with deployment() as world, running(world):
        done = await ended(world, (await created(world, lines))["id"])
        good = await results(world, done["output_file_id"])
        bad = await results(world, done["error_file_id"])

    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 7, "completed": 2, "failed": 5}
    assert [(one["custom_id"], said(one)) for one in good] == [("good", "hello"), ("better", "fine")]
    assert [(one["custom_id"], (one["error"] or {}).get("code")) for one in bad] == [
        (None, "invalid_line"),
        ("bad url", "invalid_line"),
        ("good", "duplicate_custom_id"),
        ("bad body", None),
        ("other model", None),
    ]
    assert [one["response"]["status_code"] for one in bad[3:]] == [400, 404]
    assert bad[4]["response"]["body"]["error"]["code"] == "model_not_found"


async def test_a_failure_on_the_log_is_the_result_of_its_line() -> None:
    async def script(performance: Performance) -> None:
        if performance.event.inputs.messages == [{"role": "user", "content": "poison"}]:
            performance.fail(Failure(code="worker_crashed", message="it crashed", status=500))
        else:
            await echo(performance)

    async with deployment(script) as world, running(world):
        done = await ended(world, (await created(world, [line("a", "poison"), line("b")]))["id"])
        [bad] = await results(world, done["error_file_id"])

    assert bad["custom_id"] == "a"
    assert bad["response"]["body"]["error"]["message"] == "it crashed"
    assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


async def test_a_line_that_is_told_to_try_again_is_asked_for_under_another_id() -> None:
    async def script(performance: Performance) -> None:
        if performance.request_id.endswith("-r2"):
            await echo(performance)
        else:
            performance.reject(Failure(code="queue_full", message="try again", status=503))

    async with deployment(script) as world, running(world):
        batch = await created(world, [line("a"), line("b")])
        done = await ended(world, batch["id"])
        found = await results(world, done["output_file_id"])

    assert [one["response"]["request_id"] for one in found] == [f"{batch['id']}-{n}-r2" for n in (1, 2)]
    assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"{}\n" * 4, "too_many_lines"), (b"", "unsupported_media"), (b"x", "unsupported_media")],
)
async def test_a_file_without_a_line_is_refused_and_one_with_too_many_fails(
    monkeypatch: pytest.MonkeyPatch, data: bytes, code: str
) -> None:
    monkeypatch.setattr("gateway.batches.run.MAX_LINES", 3)
    async with deployment() as world, running(world):
        if code == "unsupported_media":
            files = {"file": ("in.jsonl", data)}
            response = await world.client.post("/v1/files", files=files, data={"purpose": "batch"})
            assert (response.status_code, response.json()["error"]["code"]) == (400, code)
            return
        file_id = await uploaded(world, data)
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        batch = (await world.client.post("/v1/batches", json=body)).json()
        done = await ended(world, batch["id"])

    assert done["status"] == "failed"
    assert [one["code"] for one in done["errors"]["data"]] == [code]
    assert done["request_counts"]["total"] == 0
    assert isinstance(done["failed_at"], int)


async def test_a_batch_whose_file_is_deleted_fails_and_keeps_what_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.batches.results.SEGMENT_LINES", 1)
    hold = asyncio.Event()

    async def script(performance: Performance) -> None:
        if performance.request_id.endswith("-2"):
            await hold.wait()
        await echo(performance)

    settings = GatewaySettings(batch_lines=1)
    async with deployment(script, settings=settings) as world:
        async with running(world):
            batch = await created(world, [line("a"), line("b")])
            await world.performance(1)
        await world.client.delete(f"/v1/files/{batch['input_file_id']}")
        async with running(world):
            done = await ended(world, batch["id"])
            found = await results(world, done["output_file_id"])

    assert done["status"] == "failed"
    assert [one["code"] for one in done["errors"]["data"]] == ["media_gone"]
    assert [one["custom_id"] for one in found] == ["a"]


async def test_lines_that_run_when_the_file_is_deleted_keep_their_answers() -> None:
    hold = asyncio.Event()

    async def script(performance: Performance) -> None:
        await hold.wait()
        await echo(performance)

    pad = {"metadata": {"pad": "x" * PIECE_BYTES}}  # each line needs another piece of the file
    lines = [line(f"c{number}", body=line("x", f"{number}.")["body"] | pad) for number in range(12)]
    settings = GatewaySettings(batch_lines=2, max_body_bytes=2 * PIECE_BYTES)
    async with deployment(script, settings=settings) as world, running(world):
        batch = await created(world, lines)
        await world.performance(1)
        await world.client.delete(f"/v1/files/{batch['input_file_id']}")
        hold.set()
        done = await ended(world, batch["id"])
        found = await results(world, done["output_file_id"])

    assert done["status"] == "failed"
    assert [one["code"] for one in done["errors"]["data"]] == ["media_gone"]
    assert 2 <= len(found) < 12
    assert [said(one) for one in found] == [f"{number}." for number in range(len(found))]
    assert done["request_counts"] == {"total": 12, "completed": len(found), "failed": 0}
    assert not any(one.cancelled.is_set() for one in world.performances.values())


async def test_a_batch_names_its_model_and_sums_the_tokens_of_its_answers() -> None:
    async def script(performance: Performance) -> None:
        if performance.event.inputs.messages == [{"role": "user", "content": "poison"}]:
            performance.fail(Failure(code="worker_crashed", message="it crashed", status=500))
        else:
            await echo(performance)

    async with deployment(script) as world, running(world):
        batch = await created(world, [line("a", "one two"), line("b", "poison"), line("c", "three")])
        done = await ended(world, batch["id"])
        answers = [one["response"]["body"]["usage"] for one in await results(world, done["output_file_id"])]

    asked, written = (sum(one[name] for one in answers) for name in ("prompt_tokens", "completion_tokens"))
    assert written > 0
    assert (batch["model"], batch["usage"]["total_tokens"]) == (None, 0)
    assert done["model"] == "demo"
    assert done["usage"] == {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": asked + written,
    }


async def test_a_cancelled_batch_keeps_its_answers_and_cancels_its_requests() -> None:
    async def script(performance: Performance) -> None:
        if performance.event.inputs.messages == [{"role": "user", "content": "quick"}]:
            await echo(performance)
        else:
            await performance.cancelled.wait()

    settings = GatewaySettings(batch_lines=2)
    async with deployment(script, settings=settings) as world, running(world):
        batch = await created(world, [line("a", "quick"), line("b"), line("c"), line("d")])
        await world.performance(2)
        response = await world.client.post(f"/v1/batches/{batch['id']}/cancel")
        again = await world.client.post(f"/v1/batches/{batch['id']}/cancel")
        done = await ended(world, batch["id"])
        after = await world.client.post(f"/v1/batches/{batch['id']}/cancel")
        good = await results(world, done["output_file_id"])
        bad = await results(world, done["error_file_id"])
        cancelled = [one for one in world.performances.values() if one.cancelled.is_set()]

    assert response.json()["status"] in ("cancelling", "cancelled")
    assert again.status_code == after.status_code == 200
    assert done["status"] == after.json()["status"] == "cancelled"
    assert [one["custom_id"] for one in good] == ["a"]
    assert [(one["custom_id"], one["error"]["code"]) for one in bad] == [
        (name, "batch_cancelled") for name in "bcd"
    ]
    assert len(world.performances) == 3  # the last line was never asked for
    assert len(cancelled) == 2


async def test_a_completed_batch_cannot_be_cancelled() -> None:
    async with deployment() as world, running(world):
        batch = await created(world, [line("a")])
        await ended(world, batch["id"])
        response = await world.client.post(f"/v1/batches/{batch['id']}/cancel")

    assert (response.status_code, response.json()["error"]["code"]) == (409, "batch_has_ended")


async def test_lines_without_an_answer_expire() -> None:
    async def script(performance: Performance) -> None:
        if performance.event.inputs.messages == [{"role": "user", "content": "quick"}]:
            await echo(performance)
        else:
            await performance.cancelled.wait()

    async with deployment(script) as world, running(world):
        batch = await created(world, [line("a", "quick"), line("b")], completion_window="3s")
        done = await ended(world, batch["id"])
        [good] = await results(world, done["output_file_id"])
        [bad] = await results(world, done["error_file_id"])
        performances = [one.cancelled.is_set() for one in world.performances.values()]

    assert done["status"] == "expired"
    assert done["expired_at"] >= done["expires_at"]
    assert (good["custom_id"], bad["custom_id"]) == ("a", "b")
    assert bad["error"] == {
        "code": batch_results.EXPIRED,
        "message": "the batch expired before this line had an answer",
    }
    assert sorted(performances) == [False, True]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"endpoint": "/v1/videos"}, "endpoint", "invalid_value"),
        ({"endpoint": None}, "endpoint", "invalid_value"),
        ({"completion_window": "1y"}, "completion_window", "invalid_value"),
        ({"completion_window": "8d"}, "completion_window", "invalid_value"),
        ({"completion_window": "0s"}, "completion_window", "invalid_value"),
        ({"input_file_id": "file-x"}, "input_file_id", "file_not_found"),
        ({"input_file_id": "file-" + "0" * 64}, "input_file_id", "file_not_found"),
        ({"output_expires_after": {"seconds": 5}}, "output_expires_after", "not_supported"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
        ({"window": "24h"}, "body.window", "unknown_parameter"),
    ],
)
async def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, code: str) -> None:
    async with deployment() as world, running(world):
        file_id = await uploaded(world, jsonl([line("a")]))
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"} | fields
        response = await world.client.post("/v1/batches", json=body)
        batches = world.events("batch")

    error = response.json()["error"]
    assert response.status_code in (400, 404)
    assert (error["param"], error["code"]) == (param, code), error
    assert batches == []


async def test_batches_are_listed_from_the_newest_in_pages() -> None:
    async with deployment() as world, running(world):
        ids = [(await created(world, [line("a")]))["id"] for _ in range(3)][::-1]
        first = (await world.client.get("/v1/batches", params={"limit": 2})).json()
        second = (await world.client.get("/v1/batches", params={"limit": 2, "after": ids[1]})).json()
        wrong = await world.client.get("/v1/batches", params={"after": "batch-none"})
        none = await world.client.get("/v1/batches", params={"limit": 0})

    assert [one["id"] for one in first["data"]] == ids[:2]
    assert (first["has_more"], first["last_id"]) == (True, ids[1])
    assert [one["id"] for one in second["data"]] == ids[2:]
    assert second["has_more"] is False
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "batch_not_found")
    assert none.status_code == 400


async def test_a_batch_belongs_to_its_key() -> None:
    keys = [ApiKey(name="anna", secret="a" * 20), ApiKey(name="ben", secret="b" * 20)]
    anna, ben = ({"authorization": f"Bearer {key.secret}"} for key in keys)
    async with deployment(keys=keys) as world, running(world):
        file_id = await uploaded(world, jsonl([line("a")]), **anna)
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        theirs = await world.client.post("/v1/batches", json=body, headers=ben)
        batch = (await world.client.post("/v1/batches", json=body, headers=anna)).json()
        await until_ended(world, batch["id"])
        seen = [
            (await world.client.get(path, headers=ben)).status_code
            for path in (f"/v1/batches/{batch['id']}", f"/v1/batches/{batch['id']}/cancel")
        ]
        cancelled = await world.client.post(f"/v1/batches/{batch['id']}/cancel", headers=ben)
        listed = (await world.client.get("/v1/batches", headers=ben)).json()["data"]
        files = {
            name: [
                (one["purpose"], one["filename"])
                for one in (await world.client.get("/v1/files", headers=headers)).json()["data"]
            ]
            for name, headers in (("anna", anna), ("ben", ben))
        }
        [event] = [one for one in world.events("request") if isinstance(one, RequestSubmitted)]

    assert theirs.status_code == 404
    assert seen[0] == 404
    assert cancelled.status_code == 404
    assert listed == []
    assert event.tenant == "anna"
    assert files["ben"] == []
    assert sorted(files["anna"]) == [("batch", "in.jsonl"), ("batch_output", f"{batch['id']}_output.jsonl")]


async def test_the_files_of_a_batch_are_listed_by_their_purpose() -> None:
    async with deployment() as world, running(world):
        batch = await created(world, [line("a")])
        done = await ended(world, batch["id"])
        by_purpose = {
            purpose: [
                one["id"]
                for one in (await world.client.get("/v1/files", params={"purpose": purpose})).json()["data"]
            ]
            for purpose in ("batch", "batch_output", "vision")
        }

    assert by_purpose == {
        "batch": [batch["input_file_id"]],
        "batch_output": [done["output_file_id"]],
        "vision": [],
    }


async def test_openais_sdk_runs_a_batch() -> None:
    async with (
        deployment() as world,
        running(world),
        listening(world) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client,
    ):
        file = await client.files.create(
            file=("in.jsonl", jsonl([line("a"), line("b", "two words")])), purpose="batch"
        )
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"k": "v"},
        )
        await until_ended(world, batch.id)
        batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        content = await client.files.content(batch.output_file_id)
        listed = [one.id async for one in client.batches.list()]

    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 2
    assert [one.split('"content":"')[1].split('"')[0] for one in content.text.splitlines()] == [
        "hello",
        "two words",
    ]
    assert listed == [batch.id]
