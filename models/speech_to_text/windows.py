"""Walks and plan of encoder-decoder models that tell no times: windows that are cut at pauses. No torch.

listen       once: the file is read through, and cut into windows at its pauses    a CPU node
window       the samples of a window -> what the encoder takes                     a CPU node
encoder      -> states                                                             the stateless node
decoder      states -> tokens: its program `transcribe`                            the KV node
transcript   tokens -> text and a segment, for the client                          a CPU node
reader       the segment, as the client has it -> how many there are               a CPU node

A file that fits is one window, as transformers computes it. Each window is a segment.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from models.base import EngineKind
from models.programs import PROGRAM
from models.speech_to_text.transcript import TRANSCRIPT
from shared.errors import ClientError
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, KEEP, CompiledWalk, Edge, Node, Sequential, compile_walk

PROGRAM_NAME: Final = "transcribe"
HEARD: Final = "heard"
"""The edge of what the encoder takes."""
NODES: Final[Mapping[str, EngineKind]] = MappingProxyType(
    {
        "listen": EngineKind.CPU,
        "window": EngineKind.CPU,
        "encoder": EngineKind.STATELESS,
        "decoder": EngineKind.KV,
        "transcript": EngineKind.CPU,
        "reader": EngineKind.CPU,
    }
)
_LISTEN: Final = Node("listen", inputs=(), outputs=(Edge("file", to=KEEP),))
_WINDOW: Final = Sequential(
    Node("window", (), [Edge(HEARD, to="encoder")]),
    Node("encoder", [HEARD], [Edge("states", to="decoder")]),
    Node("decoder", ["states"], [Edge("tokens", to="transcript"), Edge("logprobs", to="transcript")]),
    Node(
        "transcript",
        ["tokens", "logprobs"],
        [
            Edge("text", to=CLIENT("text"), on_resume="keep"),
            Edge(TRANSCRIPT, to=CLIENT(TRANSCRIPT), on_resume="keep"),
            Edge(TRANSCRIPT, to="reader"),
        ],
    ),
    Node("reader", [TRANSCRIPT], [Edge("read", to=KEEP)]),
)


def walks() -> dict[str, CompiledWalk]:
    """The walks of a family."""
    return {"listen": compile_walk("listen", _LISTEN), "window": compile_walk("window", _WINDOW)}


class WindowOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a transcription by a model that tells no times.

    Attributes:
        task: the text is in the language that is spoken.
        timestamps: a segment is a window of the file; words have no times.
        silence_threshold: a window whose loudest tenth of a second is below it has no text: the root of the
            mean square of samples from -1 to 1, so 0.001 are -60 dB. Null: every window is transcribed.
    """

    task: Literal["transcribe"] = "transcribe"
    timestamps: Annotated[list[Literal["segment"]], Meta(max_length=1)] = []
    silence_threshold: Annotated[float, Meta(ge=0, le=1)] | None = 0.001


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of `listen`.

    Attributes:
        samples: of the file, at 16 kHz.
        before: the tokens in front of every text.
        starts: the first sample of each window.
        most: the most tokens of each window, those in front included.
        silent: whether there is nothing to hear in it.
    """

    samples: int
    before: list[int]
    starts: list[int]
    most: list[int]
    silent: list[bool]


def plan_windows(request: PlanRequest, options_type: type[WindowOptions]) -> Plan:
    """Listen to the file, then transcribe window after window."""
    options, inputs = request.options_as(options_type), request.inputs
    if inputs.messages or inputs.text or inputs.token_ids or len(inputs.files) != 1:
        raise ClientError(
            f"files: expected one file with speech and no text, found {len(inputs.files)} files",
            code="missing_required_parameter",
        )
    step = yield Walk("listen", args={"inputs": inputs, "options": options})
    heard = step.facts_as(Heard)
    segments, tokens = 0, 0
    for number, first in enumerate(heard.starts):
        args: dict[str, Any] = {
            "inputs": inputs,
            "options": options,
            PROGRAM: PROGRAM_NAME,
            "samples": heard.samples,
            "first": first,
            "count": [*heard.starts, heard.samples][number + 1] - first,
            "segments": segments,
            "before": heard.before,
            "most": heard.most[number],
            "temperature": request.params.temperature or 0.0,
            "is_silent": heard.silent[number],
        }
        done = yield Walk("window", args=args)
        segments, tokens = segments + done.fact("segments"), tokens + done.fact("tokens")
    counts = {"windows": len(heard.starts), "audio_ms": heard.samples // 16}
    usage = Usage(
        prompt_tokens=len(heard.starts) * (len(heard.before) - 1), completion_tokens=tokens, counts=counts
    )
    return Finish(usage=usage, finish_reasons=("stop",))
