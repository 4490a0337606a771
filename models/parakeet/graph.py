"""Graph and plan of Parakeet with a CTC head, speech to text.

listen       once: the file is read through                                        a CPU node
window       120 s of the file, and 10 s on both sides -> mel features             a CPU node
encoder      features -> the likeliest token of each frame                         the stateless node
transcript   tokens -> text, segments and words, for the client                    a CPU node
reader       the segments, as the client has them -> how many there are            a CPU node

A file of at most 120 s is one pass of the encoder, as transformers computes it.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.speech_to_text.mel import RATE
from models.speech_to_text.options import Granularity
from models.speech_to_text.transcript import TRANSCRIPT
from shared.errors import ClientError
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, KEEP, Edge, Node, Sequential, compile_walk

WINDOW_S: Final = 120
CONTEXT_S: Final = 10
"""What the encoder hears on both sides of a window of a longer file, besides it."""
MAX_POSITIONS: Final = 5000

LISTEN: Final = Node("listen", inputs=(), outputs=(Edge("heard", to=KEEP),))
WINDOW: Final = Sequential(
    Node("window", (), [Edge("features", to="encoder")]),
    Node("encoder", ["features"], [Edge("ids", to="transcript"), Edge("logprobs", to="transcript")]),
    Node(
        "transcript",
        ["ids", "logprobs"],
        [
            Edge("text", to=CLIENT("text"), on_resume="keep"),
            Edge(TRANSCRIPT, to=CLIENT(TRANSCRIPT), on_resume="keep"),
            Edge(TRANSCRIPT, to="reader"),
        ],
    ),
    Node("reader", [TRANSCRIPT], [Edge("read", to=KEEP)]),
)


class CtcOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a transcription without a language model.

    Attributes:
        task: the text is in the language that is spoken.
        timestamps: `word` gives the time of each word; segments always have times.
    """

    task: Literal["transcribe"] = "transcribe"
    timestamps: Annotated[list[Granularity], Meta(max_length=2)] = []


def plan(request: PlanRequest) -> Plan:
    """Listen to the file, then transcribe window after window."""
    options, inputs = request.options_as(CtcOptions), request.inputs
    if inputs.messages or inputs.text or inputs.token_ids or len(inputs.files) != 1:
        raise ClientError(
            f"files: expected one file with speech and no text, found {len(inputs.files)} files",
            code="missing_required_parameter",
        )
    step = yield Walk("listen", args={"inputs": inputs})
    samples: int = step.fact("samples")
    window, segments, tokens = WINDOW_S * RATE, 0, 0
    starts = range(0, samples, window)
    for start in starts:
        args = {
            "inputs": inputs,
            "options": options,
            "samples": samples,
            "start": start,
            "segments": segments,
        }
        done = yield Walk("window", args=args)
        segments, tokens = segments + done.fact("segments"), tokens + done.fact("tokens")
    counts = {"windows": len(starts), "audio_ms": samples * 1000 // RATE}
    return Finish(usage=Usage(completion_tokens=tokens, counts=counts), finish_reasons=("stop",))


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim checkpoints of the class ParakeetForCTC."""
    return Claim.ARCHITECTURE if checkpoint.architecture == "ParakeetForCTC" else None


GRAPH: Final = ModelGraph(
    family="parakeet",
    nodes={
        "listen": EngineKind.CPU,
        "window": EngineKind.CPU,
        "encoder": EngineKind.STATELESS,
        "transcript": EngineKind.CPU,
        "reader": EngineKind.CPU,
    },
    walks={"listen": compile_walk("listen", LISTEN), "window": compile_walk("window", WINDOW)},
    plan=plan,
    modalities=("audio", "video"),
    media={TRANSCRIPT: {"format": "json"}},
    repository="nvidia/parakeet-ctc-1.1b",
    options=CtcOptions,
    max_positions=MAX_POSITIONS,
    claims=claims,
    serves="Parakeet: the architecture ParakeetForCTC",
)
