"""Graph and plan of Qwen3-ASR, speech to text (`models.speech_to_text.windows`).

The encoder takes mel features, and computes 13 rows for a second.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta

from models.base import ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.qwen3_asr.settings import LANGUAGES
from models.speech_to_text.transcript import TRANSCRIPT
from models.speech_to_text.windows import NODES, WindowOptions, plan_windows, walks
from shared.plans import Plan, PlanRequest

MAX_POSITIONS: Final = 8192
"""`max_seq_len` where nothing else is configured: five minutes of sound, 3,900 rows, and their text."""


class Qwen3AsrOptions(WindowOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a transcription by a language model that hears.

    Attributes:
        task: the text is in the language that is spoken.
        timestamps: a segment is a window of the file; words have no times.
        silence_threshold: a window whose loudest tenth of a second is below it has no text: the root of the
            mean square of samples from -1 to 1, so 0.001 are -60 dB. Null: every window is transcribed.
        language: the spoken language, as a code such as `de` or a name such as `german`. Default: the model
            tells it, for each window.
        prompt: names and words that may occur, or what the speech is about.
        window_seconds: the longest window of a file. Default: 300, or as many as `max_seq_len` has room for
            beside their text. Published are at most 1200.
        max_window_tokens: the most tokens of a window, which end a text that repeats itself.
    """

    language: Annotated[str, Meta(max_length=64)] | None = None
    prompt: Annotated[str, Meta(max_length=65_536)] = ""
    window_seconds: Annotated[float, Meta(ge=1, le=1200)] | None = None
    max_window_tokens: Annotated[int, Meta(ge=1)] = 4096


def plan(request: PlanRequest) -> Plan:
    """Listen to the file, then transcribe window after window."""
    return plan_windows(request, Qwen3AsrOptions)


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim checkpoints of the class Qwen3ASRForConditionalGeneration."""
    is_asr = checkpoint.architecture == "Qwen3ASRForConditionalGeneration"
    return Claim.ARCHITECTURE if is_asr else None


def remarks(checkpoint: Path, kwargs: Mapping[str, Any]) -> list[str]:
    """The languages, for `dalsegno check` and `GET /v1/models`."""
    return [f"it detects and transcribes {', '.join(LANGUAGES)}"]


GRAPH: Final = ModelGraph(
    family="qwen3_asr",
    nodes=NODES,
    walks=walks(),
    plan=plan,
    modalities=("audio", "video"),
    media={TRANSCRIPT: {"format": "json"}},
    repository="Qwen/Qwen3-ASR-1.7B-hf",
    options=Qwen3AsrOptions,
    max_positions=MAX_POSITIONS,
    states_length=False,
    claims=claims,
    remarks=remarks,
    serves="Qwen3-ASR: the architecture Qwen3ASRForConditionalGeneration",
)
