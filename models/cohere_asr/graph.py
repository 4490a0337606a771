"""Graph and plan of Cohere Transcribe, speech to text (`models.speech_to_text.windows`).

The encoder takes mel features, and computes a frame for 80 ms.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta

from models.base import ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.speech_to_text.transcript import TRANSCRIPT
from models.speech_to_text.windows import NODES, WindowOptions, plan_windows, walks
from shared.plans import Plan, PlanRequest

MAX_POSITIONS: Final = 2048
"""`max_seq_len` where nothing else is configured: the 438 frames of 35 s, and the longest text."""


class CohereOptions(WindowOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a transcription whose language is known.

    Attributes:
        task: the text is in the language that is spoken.
        timestamps: a segment is a window of the file; words have no times.
        silence_threshold: a window whose loudest tenth of a second is below it has no text: the root of the
            mean square of samples from -1 to 1, so 0.001 are -60 dB. Null: every window is transcribed.
        language: the spoken language, as a code such as `de` or a name such as `german`. It is required,
            because the model does not detect it.
        punctuation: the text has punctuation and capitals.
        max_window_tokens: the most tokens of a window, which end a text that repeats itself.
    """

    language: Annotated[str, Meta(max_length=64)] | None = None
    punctuation: bool = True
    max_window_tokens: Annotated[int, Meta(ge=1)] = 512


def plan(request: PlanRequest) -> Plan:
    """Listen to the file, then transcribe window after window."""
    return plan_windows(request, CohereOptions)


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim checkpoints of the class CohereAsrForConditionalGeneration."""
    is_cohere = checkpoint.architecture == "CohereAsrForConditionalGeneration"
    return Claim.ARCHITECTURE if is_cohere else None


def remarks(checkpoint: Path, kwargs: Mapping[str, Any]) -> list[str]:
    """The languages of a checkpoint, for `dalsegno check` and `GET /v1/models`.

    Raises:
        CheckpointError: its settings are missing or malformed.
    """
    from models.cohere_asr.settings import CohereSettings  # noqa: PLC0415 - it imports tokenizers

    if not checkpoint.is_dir():
        return []
    languages = ", ".join(CohereSettings.read(checkpoint).languages)
    return [f"it transcribes {languages}; the language has to be named"]


GRAPH: Final = ModelGraph(
    family="cohere_asr",
    nodes=NODES,
    walks=walks(),
    plan=plan,
    modalities=("audio", "video"),
    media={TRANSCRIPT: {"format": "json"}},
    repository="CohereLabs/cohere-transcribe-03-2026",
    options=CohereOptions,
    max_positions=MAX_POSITIONS,
    states_length=False,
    claims=claims,
    remarks=remarks,
    serves="Cohere Transcribe: the architecture CohereAsrForConditionalGeneration",
)
