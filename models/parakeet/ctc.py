"""Text and times of CTC outputs: a token for each frame, or the blank. No torch.

A token counts where it begins: the same token in the next frame is the same one, unless a blank is between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Final

from msgspec import UNSET

from models.speech_to_text.transcript import Segment, Word

PAUSE_S: Final = 1.0
"""A pause of so many seconds ends a segment, and so does the end of a sentence."""
_ENDS: Final = (".", "?", "!")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A token of the text.

    Attributes:
        first, stop: the range of its frames.
        logprob: the mean over its frames.
    """

    token: int
    first: int
    stop: int
    logprob: float


def spoken(
    ids: Sequence[int], logprobs: Sequence[float], *, blank: int, first: int, stop: int
) -> list[Spoken]:
    """The tokens that begin within the frames `first` to `stop`."""
    found: list[Spoken] = []
    place = 0
    while place < len(ids):
        end = place
        while end < len(ids) and ids[end] == ids[place]:
            end += 1
        if ids[place] != blank and first <= place < stop:
            mean = sum(logprobs[place:end]) / (end - place)
            found.append(Spoken(token=ids[place], first=place, stop=end, logprob=mean))
        place = end
    return found


def words_of(
    tokens: Sequence[Spoken],
    *,
    decode: Callable[[list[int]], str],
    begins_word: Callable[[int], bool],
    frame_s: float,
    offset_s: float,
) -> list[tuple[Word, list[int]]]:
    """The words of tokens, each with its token ids.

    Args:
        tokens: in order.
        decode: the text of token ids.
        begins_word: whether a token begins a word.
        frame_s: the seconds of a frame.
        offset_s: the time of frame 0.
    """
    groups: list[list[Spoken]] = []
    for one in tokens:
        if not groups or begins_word(one.token):
            groups.append([])
        groups[-1].append(one)
    found = []
    for group in groups:
        ids = [one.token for one in group]
        word = Word(
            word=decode(ids),
            start=round(offset_s + group[0].first * frame_s, 2),
            end=round(offset_s + group[-1].stop * frame_s, 2),
            probability=sum(exp(one.logprob) for one in group) / len(group),
        )
        found.append((word, ids))
    return found


def segments_of(
    words: Sequence[tuple[Word, list[int]]],
    *,
    decode: Callable[[list[int]], str],
    first_id: int,
    seek: int,
    has_words: bool,
) -> list[Segment]:
    """The segments of words: each ends with a sentence, or before a pause.

    Args:
        words: with their token ids.
        decode: the text of token ids.
        first_id: the number of the first segment in the file.
        seek: the first mel frame of the window.
        has_words: the segments list their words.
    """
    runs: list[list[tuple[Word, list[int]]]] = []
    for word, ids in words:
        last = runs[-1][-1][0] if runs else None
        if last is None or word.start - last.end >= PAUSE_S or last.word.endswith(_ENDS):
            runs.append([])
        runs[-1].append((word, ids))
    found = []
    for number, run in enumerate(runs):
        tokens = [token for _, ids in run for token in ids]
        found.append(
            Segment(
                id=first_id + number,
                seek=seek,
                start=run[0][0].start,
                end=run[-1][0].end,
                text=f" {decode(tokens).strip()}",
                tokens=tokens,
                words=[word for word, _ in run] if has_words else UNSET,
            )
        )
    return found
