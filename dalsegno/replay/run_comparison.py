"""Comparison of two runs of a request's nodes, edge by edge. Pure.

An edge is one output of a node: a tensor to another step, a fact to the plan, or tokens, text and sound to
the client. The first edge that diverges is the one to investigate: later ones may differ because of it.

Inline tensors are compared byte by byte; of others only type and shape are known, because their bytes were
freed with the request. Sound is compared sample by sample, tokens one by one.

Values that stand once they are released are compared by `dalsegno.replay.kept_values`.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from dalsegno.bundle.bundle_file import LeftOut, digest_of
from dalsegno.replay import kept_values
from dalsegno.replay.recorded_run import RecordedStep, Run
from shared.events import OutputChunk, TokenLogprobs
from shared.output_pieces import without_void_pieces
from shared.tensors import Handle

FULL_SCALE: Final = 32768
"""The full scale of 16-bit samples."""
_FOLLOWS: Final = "not compared: the tokens differ"
_WORK: Final = "counts"
"""The fact that is not compared: what an attempt has done, and not what came out (`SequenceFacts.counts`)."""
_ADDED: Final = ("stop_reason",)
"""Facts that workers of earlier versions did not report; not compared where none was recorded."""


class ComparedEdge(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one edge of two runs.

    Attributes:
        compared: the number of tokens, samples, bytes or values; 0 if there was nothing to compare.
        diverges: the first difference; None if there is none.
        note: a restriction of the comparison.
    """

    name: str
    compared: int
    diverges: str | None = None
    note: str | None = None


def compared(
    recorded: Run,
    found: Run,
    tolerance: float | None,
    excused: Mapping[str, str] | None = None,
    kept: Mapping[str, frozenset[str]] | None = None,
) -> list[ComparedEdge]:
    """Compare every edge, in the order of output as far as it is known.

    Edges that follow from an answer's tokens are not compared if the tokens differ: they would report it
    again.

    Args:
        recorded: the run in the log.
        found: the repeated run.
        tolerance: a share of full scale for samples, a difference for log probabilities; None is exact.
        excused: the tracks whose tokens differ within the tolerance, with a note each.
        kept: by track, the modalities whose released values stand.
    """
    tracks = list(dict.fromkeys((*recorded.tracks, *found.tracks)))
    parts = any(recorded.tokens(track) != found.tokens(track) for track in tracks)
    earlier: list[ComparedEdge] = []
    later: list[ComparedEdge] = []
    for number, (index, step) in enumerate(sorted(recorded.steps.items())):
        follows = parts and step.samples_tokens
        edges = list(_of_step(index, step, found.steps.get(index), follows=follows))
        steps_before_output = recorded.steps_before_output
        (earlier if steps_before_output is None or number < steps_before_output else later).extend(edges)
    spoken: list[ComparedEdge] = []
    for track in tracks:
        spoken += _of_track(track, recorded, found, tolerance, excused or {})
        spoken += _of_modalities(track, recorded, found, tolerance, (kept or {}).get(track, frozenset()))
    return [*earlier, *spoken, *later]


def _of_step(
    index: int, step: RecordedStep, found: RecordedStep | None, *, follows: bool
) -> Iterable[ComparedEdge]:
    for name, result in step.results.items():
        other = found.results.get(name) if found is not None else None
        where = f"step {index}, {name}"
        if other is None:
            yield ComparedEdge(name=where, compared=0, diverges="it did not finish")
            continue
        for edge, handle in result.outputs.items():
            yield _of_tensor(f"{where}: tensor {edge}", handle, other.outputs.get(edge))
        if follows:
            yield ComparedEdge(name=f"{where}: facts", compared=0, note=_FOLLOWS)
        elif result.facts or other.facts:
            yield _of_facts(f"{where}: facts", result.facts, other.facts)


def _of_facts(name: str, recorded: Mapping[str, Any], found: Mapping[str, Any]) -> ComparedEdge:
    older = {name for name in _ADDED if name not in recorded}
    names = [name for name in dict.fromkeys((*recorded, *found)) if name != _WORK and name not in older]
    for key in names:
        if recorded.get(key) != found.get(key):
            shown = f"{key}: recorded {recorded.get(key)!r}, found {found.get(key)!r}"
            return ComparedEdge(name=name, compared=len(names), diverges=shown)
    return ComparedEdge(name=name, compared=len(names))


def _of_tensor(name: str, recorded: Handle, found: Handle | None) -> ComparedEdge:
    if found is None:
        return ComparedEdge(name=name, compared=0, diverges="it was not output")
    kinds = [f"{one.dtype}{list(one.shape)}" for one in (recorded, found)]
    if kinds[0] != kinds[1]:
        return ComparedEdge(name=name, compared=0, diverges=f"recorded {kinds[0]}, found {kinds[1]}")
    if recorded.data is None or found.data is None:
        return ComparedEdge(
            name=name, compared=0, note=f"{kinds[0]}: the recorded bytes are gone: only the shape is compared"
        )
    if recorded.data != found.data:
        digests = [digest_of(one.data or b"") for one in (recorded, found)]
        return ComparedEdge(
            name=name, compared=len(recorded.data), diverges=f"recorded {digests[0]}, found {digests[1]}"
        )
    return ComparedEdge(name=name, compared=len(recorded.data))


def _of_track(
    track: str, recorded: Run, found: Run, tolerance: float | None, excused: Mapping[str, str]
) -> Iterable[ComparedEdge]:
    named = f" of {track}" if track else ""
    if recorded.tokens(track) or found.tokens(track):
        yield _of_tokens(f"tokens{named}", track, recorded, found, excused.get(track))
    if recorded.logprobs(track):
        yield _of_logprobs(f"log probabilities{named}", track, recorded, found, tolerance)
    if recorded.tokens(track) != found.tokens(track):
        yield ComparedEdge(name=f"text{named}", compared=0, note=_FOLLOWS)
    elif recorded.text(track) or found.text(track):
        yield _of_text(f"text{named}", recorded.text(track), found.text(track))


def _of_modalities(
    track: str, recorded: Run, found: Run, tolerance: float | None, kept: frozenset[str]
) -> Iterable[ComparedEdge]:
    """Compare a track's outputs of every modality but text."""
    sides = (_values(track, recorded), _values(track, found))
    for modality in dict.fromkeys(chunk.modality for side in sides for chunk, _ in side):
        was, becomes = ([one for one in side if one[0].modality == modality] for side in sides)
        name = f"{modality} of {track}" if track else modality
        chunks, gone, others = [c for c, _ in was], [left for _, left in was], [c for c, _ in becomes]
        if any(left is not None for left in gone):
            edge = _of_digests(name, chunks, gone, others)
            yield _excused(edge) if modality in kept else edge
        elif modality in kept:
            compared = kept_values.compare(chunks, others, tolerance)
            yield ComparedEdge(name=name, **msgspec.structs.asdict(compared))
        else:
            yield _of_data(name, chunks, others, tolerance)


def _values(track: str, run: Run) -> list[tuple[OutputChunk, LeftOut | None]]:
    """The chunks of a track's outputs but text, without pieces that a later attempt has voided."""
    chunks = run.tracks.get(track, [])
    left_out = run.left_out.get(track) or [None] * len(chunks)
    pairs = zip(chunks, left_out, strict=True)
    return without_void_pieces((pair[0].metadata, pair) for pair in pairs if pair[0].modality != "text")


def _of_tokens(name: str, track: str, recorded: Run, found: Run, excuse: str | None) -> ComparedEdge:
    was, becomes = recorded.tokens(track), found.tokens(track)
    place = first_difference(was, becomes)
    if place is None or excuse is not None:
        return ComparedEdge(name=name, compared=len(was), note=excuse)
    return ComparedEdge(
        name=name,
        compared=len(was),
        diverges=_divergence(place, was, becomes, found.logprobs(track), recorded.logprobs(track)),
    )


def _divergence(
    place: int,
    was: Sequence[int],
    becomes: Sequence[int],
    found: Sequence[TokenLogprobs],
    recorded: Sequence[TokenLogprobs],
) -> str:
    """Describe the place where two answers diverge, with the probabilities of both tokens."""
    if place >= len(was) or place >= len(becomes):
        return f"at token {place}: recorded are {len(was)} tokens, found {len(becomes)}"
    shown = f"at token {place}: recorded {was[place]}, found {becomes[place]}"
    if place < len(found):
        ours = logprobs_in(found[place])
        shown += (
            f"; their log probabilities are {_shown(ours, was[place])} and {_shown(ours, becomes[place])}"
        )
    if place < len(recorded):
        theirs = logprobs_in(recorded[place])
        shown += f", when recorded {_shown(theirs, was[place])} and {_shown(theirs, becomes[place])}"
    return shown


def logprobs_in(one: TokenLogprobs) -> dict[int, float]:
    """The known log probabilities at one place, by token."""
    found = {likely.id: likely.logprob for likely in one.top}
    return found if one.logprob is None else found | {one.id: one.logprob}


def _shown(known: Mapping[int, float], token: int) -> str:
    return f"{known[token]:.9g}" if token in known else "below all reported ones"


def _of_logprobs(name: str, track: str, recorded: Run, found: Run, tolerance: float | None) -> ComparedEdge:
    was, becomes = recorded.logprobs(track), found.logprobs(track)
    same = first_difference(recorded.tokens(track), found.tokens(track))
    count = min(len(was), len(becomes), len(was) if same is None else same)
    worst = 0.0
    for place in range(count):
        ours = logprobs_in(becomes[place])
        for token, logprob in logprobs_in(was[place]).items():
            gap = abs(ours[token] - logprob) if token in ours else float("inf")
            worst = max(worst, gap if gap != float("inf") else 0.0)
            if gap > (tolerance or 0.0):
                shown = (
                    f"at token {place}: of token {token} recorded {logprob:.9g}, found {_shown(ours, token)}"
                )
                return ComparedEdge(name=name, compared=count, diverges=shown)
    return ComparedEdge(name=name, compared=count, note=f"differ by at most {worst:.2g}" if worst else None)


def _of_text(name: str, was: str, becomes: str) -> ComparedEdge:
    place = first_difference(was, becomes)
    if place is None:
        return ComparedEdge(name=name, compared=len(was))
    shown = (
        f"at character {place}: recorded {was[place : place + 24]!r}, found {becomes[place : place + 24]!r}"
    )
    return ComparedEdge(name=name, compared=len(was), diverges=shown)


def _of_data(
    name: str, chunks: Sequence[OutputChunk], others: Sequence[OutputChunk], tolerance: float | None
) -> ComparedEdge:
    was, becomes = (b"".join(one.data or b"" for one in side) for side in (chunks, others))
    if was == becomes:
        return ComparedEdge(name=name, compared=len(was))
    if len(was) != len(becomes) or not _is_sound(chunks):
        place = first_difference(was, becomes)
        return ComparedEdge(
            name=name, compared=len(was), diverges=f"at byte {place} of {len(was)}, found are {len(becomes)}"
        )
    return _of_samples(name, was, becomes, tolerance)


def _excused(edge: ComparedEdge) -> ComparedEdge:
    """An edge whose released values stand, of which only digests are known."""
    if edge.diverges is None:
        return edge
    note = f"{edge.diverges}; the released values stand, and numbers can be compared with --payloads only"
    return ComparedEdge(name=edge.name, compared=edge.compared, note=note)


def _of_digests(
    name: str, chunks: Sequence[OutputChunk], gone: Sequence[LeftOut | None], others: Sequence[OutputChunk]
) -> ComparedEdge:
    """Compare chunk by chunk: the bundle has only digests of their bytes."""
    total = sum(one.bytes for one in gone if one is not None)
    note = "the bundle has digests only; a tolerance needs --payloads"
    for place, (left, other) in enumerate(zip(gone, others, strict=False)):
        digest = digest_of(other.data or b"")
        if left is not None and left.digest != digest:
            shown = f"at chunk {place}: recorded {left.digest}, found {digest}"
            return ComparedEdge(name=name, compared=total, diverges=shown, note=note)
    if len(chunks) != len(others):
        shown = f"recorded are {len(chunks)} chunks, found {len(others)}"
        return ComparedEdge(name=name, compared=total, diverges=shown, note=note)
    return ComparedEdge(name=name, compared=total, note=note)


def _of_samples(name: str, was: bytes, becomes: bytes, tolerance: float | None) -> ComparedEdge:
    ones, others = array("h", was), array("h", becomes)
    gaps = [abs(a - b) for a, b in zip(ones, others, strict=True)]
    allowed = (tolerance or 0.0) * FULL_SCALE
    worst = max(gaps) / FULL_SCALE
    place = next((place for place, gap in enumerate(gaps) if gap > allowed), None)
    note = f"samples differ by at most {worst:.2g} of full scale"
    if place is None:
        return ComparedEdge(name=name, compared=len(ones), note=note)
    shown = f"at sample {place}: recorded {ones[place]}, found {others[place]}"
    return ComparedEdge(name=name, compared=len(ones), diverges=shown, note=note)


def _is_sound(chunks: Sequence[OutputChunk]) -> bool:
    """True if all chunks are 16-bit samples."""
    return all(one.modality == "audio" and one.data is not None and len(one.data) % 2 == 0 for one in chunks)


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """The first index at which two sequences differ; None if they are equal."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
