"""Requests to a tiny Whisper, or another encoder-decoder family: its plan and nodes, in a real engine.

All requests of a call run at once: their windows are computed in the same steps.
"""

import io
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from models.base import Item
from models.media.in_process import InProcessReader
from models.speech_to_text.transcript import TRANSCRIPT, Transcript
from shared.events import Inputs, Limits, Media, Params, WalkResult
from shared.plans import Finish, PlanRequest, StepResult, Walk
from shared.tensors import Handle
from tests.tiny.whisper import RATE, tiny_whisper
from tests.workers.kv_engine.engines import make_engine
from workers.data_plane.arrays import to_array
from workers.kv_engine.outputs import ProgramOutput
from workers.kv_engine.programs.spec import ProgramSpec

Samples = npt.NDArray[np.float32]


def wav(samples: Samples) -> bytes:
    """A WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def rounded(samples: Samples) -> Samples:
    """The samples as a file of 16 bits has them."""
    return (samples.clip(-1, 1) * 32767).astype("<i2").astype(np.float32) / np.float32(32768)


@dataclass
class Answer:
    """The output of a request."""

    texts: list[str] = field(default_factory=list)
    windows: list[Transcript] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens of all segments."""
        return [token for window in self.windows for one in window.segments for token in one.tokens]

    @property
    def times(self) -> list[tuple[float, float]]:
        return [(one.start, one.end) for window in self.windows for one in window.segments]


def transcribe(
    *requests: Mapping[str, Any],
    checkpoint: Path | None = None,
    family: str = "whisper",
    max_seq_len: int = 2048,
) -> list[Answer]:
    """The answers to requests that run at once.

    A request has the samples `sound`, and further options of the family; `temperature` and `seed` as well.
    """
    folder = checkpoint or tiny_whisper()
    files = {f"{number:064x}": wav(one["sound"]) for number, one in enumerate(requests)}
    processing = import_module(f"models.{family}.processing").load(
        folder, max_seq_len=max_seq_len, media=InProcessReader(files)
    )
    running = _Server(family, folder, processing)
    return running.answers([_request(number, one) for number, one in enumerate(requests)])


def _request(number: int, given: Mapping[str, Any]) -> PlanRequest:
    options = {name: value for name, value in given.items() if name not in ("sound", "temperature", "seed")}
    medium = Media(digest=f"{number:064x}", modality="audio")
    return PlanRequest(
        request_id=str(number),
        inputs=Inputs(text="", files=[medium]),
        params=Params(temperature=given.get("temperature"), options=options),
        limits=Limits(max_seq_len=2048, kv_tokens=4096, default_max_tokens=64),
        seed=given.get("seed", 0),
    )


@cache
def _torch_nodes(family: str, folder: Path) -> tuple[Any, Any]:
    load = import_module(f"models.{family}.nodes").load
    return load(folder, "encoder"), load(folder, "decoder")


@dataclass
class _Server:
    family: str
    folder: Path
    processing: Any

    @torch.inference_mode()
    def answers(self, requests: list[PlanRequest]) -> list[Answer]:
        encoder, decoder = _torch_nodes(self.family, self.folder)
        engine = make_engine(
            decoder, num_blocks=200, block_size=16, max_step_tokens=256, max_sequences=8, max_pass_tokens=512
        )
        graph = import_module(f"models.{self.family}.graph").GRAPH
        plans = [graph.plan(request) for request in requests]
        answers = [Answer() for _ in requests]
        waiting: dict[str, tuple[int, Mapping[str, Any]]] = {}

        def go_on(number: int, result: StepResult | None) -> None:
            try:
                walk = next(plans[number]) if result is None else plans[number].send(result)
            except StopIteration as stop:
                answers[number].finish = stop.value
                return
            assert isinstance(walk, Walk)
            args = walk.call().args
            if walk.name == "listen":
                go_on(number, _result(self.processing.run("listen", "k", {}, args)))
                return
            found = self.processing.run("window", "k", {}, args).outputs
            features = {name: torch.as_tensor(value) for name, value in found.items()}
            [encoded] = encoder.run([Item(inputs=features, args=args)])
            key = f"{number}/{len(answers[number].windows)}"
            waiting[key] = number, args
            inputs = {"states": to_array(encoded.outputs["states"])}
            engine.add_program(
                ProgramSpec(
                    key=key, program="transcribe", inputs=inputs, args=args, seed=requests[number].seed
                )
            )

        for number in range(len(requests)):
            go_on(number, None)
        while engine.has_work:
            for output in engine.step():
                assert isinstance(output, ProgramOutput), output
                number, args = waiting.pop(output.key)
                inputs = {name: _handle(name, array) for name, array in output.values.items()}
                written = self.processing.run("transcript", "k", inputs, args)
                answers[number].texts.append(bytes(written.handle("text").data or b"").decode())
                transcript = written.handle(TRANSCRIPT)
                found = msgspec.json.decode(bytes(transcript.data or b""), type=Transcript)
                answers[number].windows.append(found)
                read = self.processing.run("reader", "k", {TRANSCRIPT: transcript}, args)
                go_on(number, _result(read))
        assert not waiting
        return answers


def _result(found: Any) -> StepResult:
    return StepResult(walks=(WalkResult(name="", facts=dict(found.facts)),))


def _handle(name: str, array: Any) -> Handle:
    return Handle(key=name, dtype=array.dtype, shape=tuple(array.shape), data=bytes(array.data))
