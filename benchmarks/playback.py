"""Playback of streamed sound by a listener who starts it with the first chunk. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of sound: when it came, in seconds after the request, and how long it plays."""

    at_s: float
    plays_s: float


@dataclass(frozen=True, slots=True)
class Playback:
    """How a stream sounds.

    Attributes:
        first_s: seconds from the request to the first sound.
        underruns: how often the sound stopped, because the next chunk had not come.
        silent_s: for how long, in total.
    """

    first_s: float
    underruns: int
    silent_s: float


def played(chunks: Sequence[Chunk]) -> Playback:
    """Play chunks in order, each as soon as it is there and the one before has ended.

    Raises:
        ValueError: there is no sound.
    """
    sounding = [chunk for chunk in chunks if chunk.plays_s > 0]
    if not sounding:
        raise ValueError("expected a stream with sound, found none")
    first_s = sounding[0].at_s
    ends_s, underruns, silent_s = first_s, 0, 0.0
    for chunk in sounding:
        if chunk.at_s > ends_s:
            underruns += 1
            silent_s += chunk.at_s - ends_s
            ends_s = chunk.at_s
        ends_s += chunk.plays_s
    return Playback(first_s, underruns, silent_s)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that `share` of them do not exceed (nearest rank)."""
    ranked = sorted(values)
    rank = -(-len(ranked) * round(share * 100) // 100)
    return ranked[max(rank, 1) - 1]
