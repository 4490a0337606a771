"""Graph and plan of Whisper, speech to text.

listen       once: the file is read through, and the request is checked             a CPU node
window       30 s of the file -> mel features                                      a CPU node
encoder      features -> states                                                    the stateless node
decoder      states -> tokens: its program `transcribe`                            the KV node
transcript   tokens -> text and segments, for the client                           a CPU node
reader       the segments, as the client has them -> where the next window begins  a CPU node

The plan orders one walk for each window. So a long file is never in memory as a whole, and a request whose
worker has died goes on with the window that it was at.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from models.base import EngineKind, ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.programs import PROGRAM
from models.speech_to_text.options import SpeechOptions, temperatures
from models.speech_to_text.transcript import TRANSCRIPT
from models.whisper.settings import WhisperSettings
from shared.errors import ClientError
from shared.events import Usage
from shared.plans import Finish, Plan, PlanRequest, Walk
from shared.walks import CLIENT, KEEP, Edge, Node, Sequential, compile_walk

PROGRAM_NAME: Final = "transcribe"
MAX_POSITIONS: Final = 2048
"""`max_seq_len` where nothing else is configured: the frames and tokens of a window of any published
checkpoint, 1,948 of them, and of a smaller one."""
LISTEN: Final = Node("listen", inputs=(), outputs=(Edge("heard", to=KEEP),))
WINDOW: Final = Sequential(
    Node("window", (), [Edge("features", to="encoder")]),
    Node("encoder", ["features"], [Edge("states", to="decoder")]),
    Node(
        "decoder",
        ["states"],
        [Edge(name, to="transcript") for name in ("tokens", "logprobs", "figures", "attention")],
    ),
    Node(
        "transcript",
        ["tokens", "logprobs", "figures", "attention"],
        [
            Edge("text", to=CLIENT("text"), on_resume="keep"),
            Edge(TRANSCRIPT, to=CLIENT(TRANSCRIPT), on_resume="keep"),
            Edge(TRANSCRIPT, to="reader"),
        ],
    ),
    Node("reader", [TRANSCRIPT], [Edge("read", to=KEEP)]),
)


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of `listen`.

    Attributes:
        samples: of the file, at 16 kHz.
        frames: the mel frames that windows are taken of.
        loudest: the largest log-mel value of the file.
        language: the token of the language that was asked for; None: it is to be detected.
        prompt_ids: the tokens of the prompt.
        has_times: times are written.
    """

    samples: int
    frames: int
    loudest: float
    language: int | None
    prompt_ids: list[int]
    has_times: bool


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of `reader`.

    Attributes:
        seek: the first mel frame of the next window.
        segments: those of this window.
        language: the token of the language; None for a model of one language.
        tokens: the number of generated tokens.
    """

    seek: int
    segments: int
    language: int | None
    tokens: int


def plan(request: PlanRequest) -> Plan:
    """Listen to the file, then transcribe window after window."""
    options, inputs = request.options_as(SpeechOptions), request.inputs
    if inputs.messages or inputs.text or inputs.token_ids or len(inputs.files) != 1:
        raise ClientError(
            f"files: expected one file with speech and no text, found {len(inputs.files)} files; a text that "
            "precedes the speech is the option `prompt`",
            code="missing_required_parameter",
        )
    step = yield Walk("listen", args={"inputs": inputs, "options": options})
    heard = step.facts_as(Heard)
    seek, segments, tokens, windows, language = 0, 0, 0, 0, heard.language
    while seek < heard.frames:
        args: dict[str, Any] = {
            "inputs": inputs,
            "options": options,
            PROGRAM: PROGRAM_NAME,
            "seek": seek,
            "segments": segments,
            "heard": heard,
            "language": language,
            "prompt_ids": heard.prompt_ids,
            "has_times": heard.has_times,
            "temperatures": temperatures(request.params.temperature),
        }
        done = yield Walk("window", args=args)
        read = done.facts_as(Read)
        seek, language = read.seek, read.language
        segments, tokens, windows = segments + read.segments, tokens + read.tokens, windows + 1
    usage = Usage(
        prompt_tokens=windows * len(heard.prompt_ids),
        completion_tokens=tokens,
        counts={"windows": windows, "audio_ms": heard.samples // 16},
    )
    return Finish(usage=usage, finish_reasons=("stop",))


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim checkpoints of the class WhisperForConditionalGeneration."""
    is_whisper = checkpoint.architecture == "WhisperForConditionalGeneration"
    return Claim.ARCHITECTURE if is_whisper else None


def remarks(checkpoint: Path, kwargs: Mapping[str, Any]) -> list[str]:
    """The languages of a checkpoint, for `dalsegno check` and `GET /v1/models`.

    Raises:
        CheckpointError: its settings are missing or malformed.
    """
    if not checkpoint.is_dir():
        return []
    languages = sorted(WhisperSettings.read(checkpoint).languages)
    if not languages:
        return ["it transcribes English alone, and translates nothing"]
    return [f"it transcribes {', '.join(languages)}, and translates them into English"]


GRAPH: Final = ModelGraph(
    family="whisper",
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
    repository="openai/whisper-large-v3-turbo",
    options=SpeechOptions,
    max_positions=MAX_POSITIONS,
    claims=claims,
    remarks=remarks,
    serves="Whisper: the architecture WhisperForConditionalGeneration",
)
