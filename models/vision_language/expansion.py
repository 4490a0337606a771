"""From a rendered chat to the tokens of its media: placeholders become texts, and tokens become parts.

A template writes one placeholder per medium. It is replaced by the text that stands for the medium, which
contains the *row token* once per row that the tower makes of it. The whole text is then encoded, as
transformers' processors do, and the runs of row tokens are the parts.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from models.sequence_request import PromptPart
from shared.errors import ClientError
from shared.events import digest_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_DIGEST: int = 32
"""The hex digits of the digests of rows: 128 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One medium, processed.

    Attributes:
        pixels: float32, as the tower takes them.
        text: the text that replaces its placeholder.
        rows: the number of row tokens in `text`.
        grid: for the tower (`models.vision_language.visuals.Visual`).
        grids: by run of row tokens, for positions of several axes; empty: `grid` for each of them.
        seconds: the time between two frames.
        full: its tokens see one another in both directions.
        arguments: what the rows depend on besides the medium and the checkpoint.
    """

    pixels: "npt.NDArray[np.float32]"
    text: str
    rows: int
    grid: tuple[int, ...] = ()
    grids: Sequence[tuple[int, ...]] = field(default=())
    seconds: float = 0.0
    full: bool = False
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMedium:
    """A processed medium of a prompt."""

    modality: str
    medium: str
    seen: Seen

    @property
    def digest(self) -> str:
        """Names its rows: of the medium, and of the arguments that they depend on."""
        return digest_of((self.medium, self.seen.arguments))[:_DIGEST]


def placeholders_in(
    text: str, placeholders: Mapping[str, str], given: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The modality of each placeholder in a text, in order, and the texts around them.

    `given` are the modalities of the media. Each placeholder has to be one that the chat template wrote for
    one of them: a text of the client that contains it would otherwise take the place of a medium.

    Raises:
        ClientError: there are more or fewer placeholders of a modality than media.
    """
    by_text = {placeholder: modality for modality, placeholder in placeholders.items()}
    pieces = re.split("(" + "|".join(re.escape(one) for one in by_text) + ")", text)
    found = [by_text[piece] for piece in pieces[1::2]]
    for modality, placeholder in placeholders.items():
        if found.count(modality) != given.count(modality):
            raise ClientError(
                f"the prompt has {found.count(modality)} places for a medium of the kind {modality!r}, and "
                f"the request has {given.count(modality)}: expected the chat template to place each, and no "
                f"text of the request to contain {placeholder!r}",
                code="media_mismatch",
            )
    return found, pieces[::2]


def expanded(around: Sequence[str], media: Sequence[PlacedMedium]) -> str:
    """The text with each placeholder replaced by the text of its medium."""
    return (
        "".join(before + medium.seen.text for before, medium in zip(around, media, strict=False)) + around[-1]
    )


def parts_of(
    ids: Sequence[int], row_tokens: Collection[int], media: Sequence[PlacedMedium]
) -> list[PromptPart]:
    """The runs of row tokens in a prompt, with the medium of each.

    Raises:
        ClientError: the prompt has other row tokens than those of its media: a text contained one.
    """
    places = [place for place, token_id in enumerate(ids) if token_id in row_tokens]
    expected = sum(medium.seen.rows for medium in media)
    if len(places) != expected:
        raise ClientError(
            f"the prompt has {len(places)} tokens that stand for media, expected {expected}: a text of the "
            "request contains one of the model's special tokens; leave it out",
            code="media_mismatch",
        )
    found, begin = list[PromptPart](), 0
    for medium in media:
        found += _parts_of_one(places[begin : begin + medium.seen.rows], medium)
        begin += medium.seen.rows
    return found


def _parts_of_one(places: Sequence[int], medium: PlacedMedium) -> list[PromptPart]:
    starts = [n for n, place in enumerate(places) if n == 0 or places[n - 1] != place - 1]
    seen, digest, found = medium.seen, medium.digest, list[PromptPart]()
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(places)], strict=True)):
        found.append(
            PromptPart(
                start=places[start],
                count=end - start,
                digest=digest if not number else digest_of((digest, number))[:_DIGEST],
                grid=tuple(seen.grids[number]) if seen.grids else seen.grid,
                full=seen.full,
                seconds=seen.seconds,
                modality=medium.modality,
            )
        )
    return found
