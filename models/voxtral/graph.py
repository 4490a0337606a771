"""Graph and plan of Voxtral, speech to text (`models.speech_to_text.windows`).

The encoder takes 30 s of mel features at once, and makes 375 rows of them.
"""

from typing import Annotated, Final

from msgspec import Meta

from models.base import ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.speech_to_text.transcript import TRANSCRIPT
from models.speech_to_text.windows import NODES, WindowOptions, plan_windows, walks
from shared.plans import Plan, PlanRequest

MAX_POSITIONS: Final = 8192
"""`max_seq_len` where nothing else is configured: five minutes of sound, 3,750 rows, and their text."""


class VoxtralOptions(WindowOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a transcription by a language model that hears.

    Attributes:
        task: the text is in the language that is spoken.
        timestamps: a segment is a window of the file; words have no times.
        silence_threshold: a window whose loudest tenth of a second is below it has no text: the root of the
            mean square of samples from -1 to 1, so 0.001 are -60 dB. Null: every window is transcribed.
        language: the spoken language, as a code such as `de` or a name such as `german`. Default: the model
            detects it, and does not tell it.
        window_seconds: the longest window of a file. Default: 300, or as many as `max_seq_len` has room for
            beside their text. Published are at most 1800.
        max_window_tokens: the most tokens of a window, which end a text that repeats itself.
    """

    language: Annotated[str, Meta(max_length=64)] | None = None
    window_seconds: Annotated[float, Meta(ge=1, le=1800)] | None = None
    max_window_tokens: Annotated[int, Meta(ge=1)] = 4096


def plan(request: PlanRequest) -> Plan:
    """Listen to the file, then transcribe window after window."""
    return plan_windows(request, VoxtralOptions)


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim checkpoints of the class VoxtralForConditionalGeneration."""
    is_voxtral = checkpoint.architecture == "VoxtralForConditionalGeneration"
    return Claim.ARCHITECTURE if is_voxtral else None


GRAPH: Final = ModelGraph(
    family="voxtral",
    nodes=NODES,
    walks=walks(),
    plan=plan,
    modalities=("audio", "video"),
    media={TRANSCRIPT: {"format": "json"}},
    repository="mistralai/Voxtral-Mini-3B-2507",
    options=VoxtralOptions,
    max_positions=MAX_POSITIONS,
    states_length=False,
    claims=claims,
    serves="Voxtral: the architecture VoxtralForConditionalGeneration",
)
