"""Graph and plan of Moonshine, speech to text.

listen       once: the file is read through, and cut into windows at its pauses    a CPU node
window       the samples of a window                                               a CPU node
encoder      samples -> states, 42 for a second                                    the stateless node
decoder      states -> tokens: its program `transcribe`                            the KV node
transcript   tokens -> text and a segment, for the client                          a CPU node
reader       the segment, as the client has it -> how many there are               a CPU node

A file that fits is one window, as transformers computes it. The model tells no times, so each window is a
segment.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.moonshine.settings import most_tokens
from models.programs import PROGRAM
from models.speech_to_text.transcript import TRANSCRIPT
from shared.errors import ClientError
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, KEEP, Edge, Node, Sequential, compile_walk

PROGRAM_NAME: Final = "transcribe"
MAX_POSITIONS: Final = 2048
"""`max_seq_len` where nothing else is configured: half a minute of sound, 1,243 frames, and its text."""
LISTEN: Final = Node("listen", inputs=(), outputs=(Edge("heard", to=KEEP),))
WINDOW: Final = Sequential(
    Node("window", (), [Edge("sound", to="encoder")]),
    Node("encoder", ["sound"], [Edge("states", to="decoder")]),
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


class MoonshineOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a transcription by a model that tells no times.

    Attributes:
        task: the text is in the language that is spoken.
        timestamps: a segment is a window of the file; words have no times.
        tokens_per_second: the most tokens of a second of speech, which ends a text that repeats itself.
            Published for texts in Latin script is 6.5, for others 13.
        silence_threshold: a window whose loudest 20 ms are below it has no text: the root of the mean square
            of samples from -1 to 1, so 0.001 are -60 dB. Null: every window is transcribed.
    """

    task: Literal["transcribe"] = "transcribe"
    timestamps: Annotated[list[Literal["segment"]], Meta(max_length=1)] = []
    tokens_per_second: Annotated[float, Meta(ge=1, le=40)] = 6.5
    silence_threshold: Annotated[float, Meta(ge=0, le=1)] | None = 0.001


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of `listen`.

    Attributes:
        samples: of the file, at 16 kHz.
        starts: the first sample of each window.
        loudest: the level of each window's loudest 20 ms.
        start: the token before every text.
        positions: the most tokens of a text.
    """

    samples: int
    starts: list[int]
    loudest: list[float]
    start: int
    positions: int


def plan(request: PlanRequest) -> Plan:
    """Listen to the file, then transcribe window after window."""
    options, inputs = request.options_as(MoonshineOptions), request.inputs
    if inputs.messages or inputs.text or inputs.token_ids or len(inputs.files) != 1:
        raise ClientError(
            f"files: expected one file with speech and no text, found {len(inputs.files)} files",
            code="missing_required_parameter",
        )
    step = yield Walk("listen", args={"inputs": inputs, "options": options})
    heard = step.facts_as(Heard)
    segments, tokens, quiet = 0, 0, options.silence_threshold
    for first, stop, loudest in zip(
        heard.starts, [*heard.starts[1:], heard.samples], heard.loudest, strict=True
    ):
        args: dict[str, Any] = {
            "inputs": inputs,
            PROGRAM: PROGRAM_NAME,
            "samples": heard.samples,
            "first": first,
            "count": stop - first,
            "segments": segments,
            "before": [heard.start],
            "most": most_tokens(stop - first, options.tokens_per_second, heard.positions),
            "temperature": request.params.temperature or 0.0,
            "is_silent": quiet is not None and loudest < quiet,
        }
        done = yield Walk("window", args=args)
        segments, tokens = segments + done.fact("segments"), tokens + done.fact("tokens")
    counts = {"windows": len(heard.starts), "audio_ms": heard.samples // 16}
    return Finish(usage=Usage(completion_tokens=tokens, counts=counts), finish_reasons=("stop",))


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim checkpoints of the class MoonshineForConditionalGeneration."""
    is_moonshine = checkpoint.architecture == "MoonshineForConditionalGeneration"
    return Claim.ARCHITECTURE if is_moonshine else None


GRAPH: Final = ModelGraph(
    family="moonshine",
    nodes={
        "listen": EngineKind.CPU,
        "window": EngineKind.CPU,
        "encoder": EngineKind.STATELESS,
        "decoder": EngineKind.KV,
        "transcript": EngineKind.CPU,
        "reader": EngineKind.CPU,
    },
    walks={"listen": compile_walk("listen", LISTEN), "window": compile_walk("window", WINDOW)},
    plan=plan,
    modalities=("audio", "video"),
    media={TRANSCRIPT: {"format": "json"}},
    repository="UsefulSensors/moonshine-base",
    options=MoonshineOptions,
    max_positions=MAX_POSITIONS,
    states_length=False,
    claims=claims,
    serves="Moonshine: the architecture MoonshineForConditionalGeneration",
)
