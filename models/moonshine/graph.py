"""Graph and plan of Moonshine, speech to text (`models.speech_to_text.windows`).

The encoder takes samples, and computes 42 frames for a second; that of the streaming version 50.
"""

from typing import Annotated, Final

from msgspec import Meta

from models.base import ModelGraph
from models.checkpoints.claims import CheckpointInfo, Claim
from models.moonshine.settings import ARCHITECTURES
from models.speech_to_text.transcript import TRANSCRIPT
from models.speech_to_text.windows import NODES, WindowOptions, plan_windows, walks
from shared.plans import Plan, PlanRequest

MAX_POSITIONS: Final = 2048
"""`max_seq_len` where nothing else is configured: half a minute of sound, 1,243 frames, and its text."""


class MoonshineOptions(WindowOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a transcription by a model that tells no times.

    Attributes:
        task: the text is in the language that is spoken.
        timestamps: a segment is a window of the file; words have no times.
        silence_threshold: a window whose loudest tenth of a second is below it has no text: the root of the
            mean square of samples from -1 to 1, so 0.001 are -60 dB. Null: every window is transcribed.
        tokens_per_second: the most tokens of a second of speech, which ends a text that repeats itself.
            Published for texts in Latin script is 6.5, for others 13.
    """

    tokens_per_second: Annotated[float, Meta(ge=1, le=40)] = 6.5


def plan(request: PlanRequest) -> Plan:
    """Listen to the file, then transcribe window after window."""
    return plan_windows(request, MoonshineOptions)


def claims(checkpoint: CheckpointInfo) -> Claim | None:
    """Claim checkpoints of Moonshine's classes."""
    return Claim.ARCHITECTURE if checkpoint.architecture in ARCHITECTURES else None


GRAPH: Final = ModelGraph(
    family="moonshine",
    nodes=NODES,
    walks=walks(),
    plan=plan,
    modalities=("audio", "video"),
    media={TRANSCRIPT: {"format": "json"}},
    repository="UsefulSensors/moonshine-base",
    options=MoonshineOptions,
    max_positions=MAX_POSITIONS,
    states_length=False,
    claims=claims,
    serves=f"Moonshine: the architectures {' and '.join(ARCHITECTURES)}",
)
