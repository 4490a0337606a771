"""Facts and arguments of walks over media: what `prepare` tells the plan, and the plan the tower.

A *visual* is one medium of a prompt, an image or a video, as pixels for the tower. The pixels of all visuals
of a request are one flat array, in the order of the prompt; a `Visual` says how its share of it is shaped.
"""

from collections.abc import Sequence

import msgspec

from models.sequence_request import PreparedPrompt, PromptPart, SequenceRequest


class Visual(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One medium of a prompt, as the tower gets it.

    Attributes:
        digest: of the medium and of everything else that changes its rows (hex).
        shape: the shape of its pixels, float32.
        grid: the patches that its rows stand for: frames, rows, columns; empty where the shape says it.
        rows: the number of rows that the tower makes of it.
        modality: `image` or `video`.
    """

    digest: str
    shape: tuple[int, ...]
    rows: int
    grid: tuple[int, ...] = ()
    modality: str = "image"


class PreparedMedia(PreparedPrompt, frozen=True, kw_only=True, omit_defaults=True):
    """Facts that `prepare_media` reports to the plan: those of any prompt, and its media."""

    parts: Sequence[PromptPart] = ()
    visuals: Sequence[Visual] = ()


class MediaSequenceRequest(SequenceRequest, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of a walk that starts a sequence whose prompt has media: `visuals` are for the tower."""

    visuals: Sequence[Visual] = ()
