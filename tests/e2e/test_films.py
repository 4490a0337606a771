"""Films by a tiny Wan2.1 over the real command line: jobs, whose store is the log, and a lost gateway."""

import base64
import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import av
import httpx
import pytest
from click.testing import CliRunner

from dalsegno.ask.command import ask
from tests.e2e.deploy import Running, serve
from tests.tiny.diffusion import tiny_pipeline

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
ASKED: Final = {"prompt": "a red kite", "size": "64x64", "fps": 8, "seed": 3, "steps": 4}
SECONDS: Final = 60.0


def test_films_are_jobs_on_the_log(tmp_path: Path) -> None:
    with serve(tmp_path, model=str(tiny_pipeline("wan21"))) as running:
        film, job = a_film_survives_its_gateway(running)
        the_same_seed_gives_the_same_film(running, film)
        what_the_model_cannot_make_is_refused(running)
        a_deletion_stops_a_film(running)
        ask_saves_a_film(running, tmp_path / "film.mp4")
        with client(running) as http:
            listed = http.get("/v1/videos", params={"order": "asc", "limit": 1}).json()

    assert listed["data"] == [job]


def client(running: Running) -> httpx.Client:
    return httpx.Client(base_url=running.url, timeout=SECONDS)


def polled(running: Running, job: str, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Poll a job, as clients do, until a condition holds; a gateway that is away is asked again."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.05)
        try:
            response = httpx.get(f"{running.url}/v1/videos/{job}", timeout=SECONDS)
        except httpx.TransportError:
            continue
        if response.status_code == 200 and until(found := response.json()):
            return dict(found)
    raise AssertionError(f"the job did not get there:\n{running.log()}")


def a_film_survives_its_gateway(running: Running) -> tuple[bytes, dict[str, Any]]:
    with client(running) as http:
        made = http.post("/v1/videos", json=ASKED | {"seconds": "0.5", "steps": 20}).json()
    polled(running, made["id"], lambda job: job["progress"] > 0)
    os.kill(running.pids.gateway[0], signal.SIGKILL)
    job = polled(running, made["id"], lambda job: job["status"] in ("completed", "failed"))
    with client(running) as http:
        content = http.get(f"/v1/videos/{job['id']}/content").content
        part = http.get(f"/v1/videos/{job['id']}/content", headers={"range": "bytes=4-7"}).content

    assert (job["status"], job["progress"], job["error"]) == ("completed", 100, None)
    assert (job["size"], job["seconds"]) == ("64x64", "0.625")  # 5 frames: the nearest number to 4
    assert frames(content) == 5
    assert part == content[4:8] == b"ftyp"
    return content, job


def the_same_seed_gives_the_same_film(running: Running, film: bytes) -> None:
    with client(running) as http:
        asked = ASKED | {"num_frames": 5, "steps": 20}
        same = http.post("/v1/videos/generations", json=asked).json()["data"][0]
        other = http.post("/v1/videos/generations", json=asked | {"seed": 4}).json()["data"][0]
        pictures = http.post(
            "/v1/videos/generations", json=ASKED | {"num_frames": 5, "response_format": "frames_b64_png"}
        ).json()["data"][0]

    assert base64.b64decode(same["b64_json"]) == film
    assert base64.b64decode(other["b64_json"]) != film
    assert (same["fps"], same["frames"], same["size"]) == (8, 5, "64x64")
    assert len(pictures["frames_b64_png"]) == 5


def what_the_model_cannot_make_is_refused(running: Running) -> None:
    for field, value, nearest in (("size", "65x64", "64"), ("num_frames", 6, "5"), ("steps", 101, "100")):
        with client(running) as http:
            refused = http.post("/v1/videos", json=ASKED | {field: value})
        assert refused.status_code == 400
        assert f"the nearest is {nearest}" in refused.json()["error"]["message"]


def a_deletion_stops_a_film(running: Running) -> None:
    with client(running) as http:
        job = http.post("/v1/videos", json=ASKED | {"size": "128x128", "num_frames": 81, "steps": 100}).json()
        deleted = http.delete(f"/v1/videos/{job['id']}")
        gone = http.get(f"/v1/videos/{job['id']}")
        while (status := http.get(f"/v1/requests/{job['id']}").json()["status"]) in ("running", "cancelling"):
            pass

    assert (deleted.status_code, gone.status_code, status) == (200, 404, "cancelled")


def ask_saves_a_film(running: Running, path: Path) -> None:
    command = ["a red kite over dunes", "--out", str(path), "--size", "64x64", "--seconds", "0.2"]
    result = CliRunner().invoke(ask, [*command, "--url", running.url])

    assert result.exit_code == 0, result.output
    assert result.stdout == f"{path}\n"
    assert "step 1 of 50" in result.stderr
    assert frames(path.read_bytes()) == 5


def frames(film: bytes) -> int:
    file = av.open(io.BytesIO(film), "r")
    assert file.streams.video[0].codec.name == "h264"
    return len(list(file.decode(file.streams.video[0])))
