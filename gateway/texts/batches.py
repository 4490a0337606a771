"""Batches: the entries of one HTTP request as one request on the log, or as several if they are large.

An event has a limit (`max_payload` of the NATS server, 1 MB by default), so texts of more than `BATCH_BYTES`
together are divided. The rows of a batch's output are those of its texts, and then those of its images
(`shared.events.Inputs.texts`); `order` says to which entries of the body they belong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.media.sources import MediaSource
from gateway.texts.entries import Entry, Text
from shared.events import MAX_TEXTS, Inputs

BATCH_BYTES: Final = 256 * 1024
"""The most bytes of texts in one request on the log: a quarter of the usual limit of an event."""
_ID_BYTES: Final = 5
"""The bytes of a token id in an event, at most: MessagePack's unsigned 32 bits."""


@dataclass(slots=True)
class Batch:
    """The entries of one request on the log.

    Attributes:
        order: the indices of the entries in the body, in the order of the output's rows.
        queries: one for all entries, one for each of them in this order, or none.
    """

    entries: list[Entry] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    queries: list[Text] = field(default_factory=list)

    @property
    def images(self) -> list[MediaSource]:
        """The sources of the images."""
        return [entry.image for entry in self.entries if entry.image is not None]

    @property
    def text_places(self) -> list[str]:
        """The places of the texts in the body."""
        return [entry.where for entry in self.entries if entry.image is None]

    def inputs(self, modality: str) -> Inputs:
        """Return the inputs of the request on the log, whose files are added later."""
        return Inputs(
            texts=[entry.text for entry in self.entries if entry.image is None],
            queries=self.queries,
            output_modalities=[modality],
        )


def batches_of(entries: Sequence[Entry], queries: Sequence[Text] = ()) -> list[Batch]:
    """Divide entries into batches; all images are in the first one, whose media are stored together.

    Args:
        entries: in the order of the body.
        queries: one for all entries, one for each of them, or none.
    """
    has_own = len(queries) == len(entries) > 1
    found = [Batch()]
    size = 0
    for index, entry in enumerate(entries):
        if entry.image is not None:
            continue
        query = queries[index] if has_own else queries[0] if queries else ""
        more = _bytes_of(entry.text) + (_bytes_of(query) if has_own else 0)
        is_full = size + more > BATCH_BYTES or len(found[-1].entries) == MAX_TEXTS
        if found[-1].entries and is_full:
            found.append(Batch())
            size = 0
        found[-1].entries.append(entry)
        found[-1].order.append(index)
        size += more
    images = [index for index, entry in enumerate(entries) if entry.image is not None]
    found[0].entries += [entries[index] for index in images]
    found[0].order += images
    for batch in found:
        batch.queries = [queries[index] for index in batch.order] if has_own else list(queries)
    return found


def _bytes_of(text: Text) -> int:
    return len(text.encode()) if isinstance(text, str) else _ID_BYTES * len(text)
