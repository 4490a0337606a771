"""Videos with their sound track: rows of both stand in the prompt in the order of time.

    begin of sound, rows of the first moments, sound of the first moments, the next rows, ..., end of sound

The families differ in the order. Positions count time for both, so a row of sound has those of its moment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from models.sequence_request import PromptPart
from models.vision_language.expansion import PlacedMedium, Seen
from shared.events import digest_of

if TYPE_CHECKING:
    import numpy as np

Order: TypeAlias = Callable[["np.ndarray", int], Sequence[bool]]
"""By the times of the rows of a video, in positions, and the number of those of its sound, one position
apart: whether each row of the prompt is one of sound."""

_DIGEST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Film(Seen):
    """A video with its sound.

    Attributes:
        picture: the video alone.
        track: its sound.
        is_sound: of each row.
    """

    picture: Seen
    track: Seen
    is_sound: Sequence[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmTokens:
    """How a family writes a video with its sound.

    Attributes:
        video, audio: the texts of the tokens of a row.
        begin, end: those around it.
        per_second: the positions of a second.
        order: of its rows.
    """

    video: str
    audio: str
    begin: str
    end: str
    per_second: float
    order: Order

    def film(self, picture: Seen, track: Seen) -> Film:
        """A video and its sound, as the prompt takes them."""
        import numpy as np  # noqa: PLC0415 - only for media

        planes = np.arange(picture.grid[0]).repeat(picture.rows // picture.grid[0])
        is_sound = self.order(planes * picture.seconds * self.per_second, track.rows)
        rows = "".join(self.audio if one else self.video for one in is_sound)
        return Film(
            pixels=picture.pixels,
            text=f"{self.begin}{rows}{self.end}",
            rows=len(is_sound),
            arguments=picture.arguments,
            picture=picture,
            track=track,
            is_sound=is_sound,
        )


def parts_of_films(parts: Sequence[PromptPart], media: Sequence[PlacedMedium]) -> list[PromptPart]:
    """The parts of a prompt, one for each medium, where those of films are cut into parts of one modality."""
    found = list[PromptPart]()
    for part, medium in zip(parts, media, strict=True):
        found += _cut(part, medium.seen) if isinstance(medium.seen, Film) else [part]
    return found


def _cut(part: PromptPart, film: Film) -> list[PromptPart]:
    """The runs of a film. The first of each modality has the grid of all of them."""
    found, start, grids = list[PromptPart](), part.start, {False: film.picture.grid, True: film.track.grid}
    for is_sound, run in groupby(film.is_sound):
        count = len(list(run))
        found.append(
            msgspec.structs.replace(
                part,
                start=start,
                count=count,
                digest=digest_of((part.digest, start - part.start, count, is_sound))[:_DIGEST],
                grid=grids.pop(is_sound, ()),
                seconds=0.0 if is_sound else film.picture.seconds,
                modality="audio" if is_sound else "video",
            )
        )
        start += count
    return found


def has_film(parts: Sequence[PromptPart]) -> bool:
    """True if rows of sound are next to rows of a video: else there is a token between two media."""
    return any(
        {before.modality, after.modality} == {"video", "audio"} and before.start + before.count == after.start
        for before, after in pairwise(parts)
    )


def apart(media: Sequence[PlacedMedium]) -> list[PlacedMedium]:
    """The media for encoders: a film is a video, and its sound."""
    found = list[PlacedMedium]()
    for one in media:
        if isinstance(one.seen, Film):
            found.append(replace(one, seen=one.seen.picture))
            found.append(replace(one, modality="audio", seen=one.seen.track))
        else:
            found.append(one)
    return found
