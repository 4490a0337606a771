"""Whole values of an answer: the pieces of a large tensor are put together in a spool."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gateway.generate.spool import Span, Spool
from gateway.generate.tensor_files import TensorFormat, TensorHead, base64_of, file_of, tensor_head
from shared.events import OutputChunk
from shared.output_pieces import PieceAssembler, whole_metadata


@dataclass(frozen=True, slots=True)
class OutputValue:
    """A value of another modality than text.

    Attributes:
        head: the tensor that is sent as a file; None for bytes that are sent as they are.
        spans: the places of its bytes in the spool.
    """

    modality: str
    metadata: dict[str, Any]
    head: TensorHead | None
    spans: list[Span]

    @property
    def nbytes(self) -> int:
        return sum(span.stop - span.start for span in self.spans)


@dataclass(slots=True)
class ValueAssembler:
    """Puts an answer's chunks together to values; `form` is the format of tensors."""

    form: TensorFormat
    _spool: Spool = field(default_factory=Spool)
    _pieces: PieceAssembler[Span] = field(default_factory=PieceAssembler)

    def push(self, chunk: OutputChunk) -> OutputValue | None:
        """Add a chunk; return the value that it completes."""
        spans = self._pieces.push(chunk.metadata, self._spool.append(chunk.data or b""))
        if spans is None:
            return None
        metadata = whole_metadata(chunk.metadata)
        head = tensor_head(chunk.modality, metadata) if self.form != "raw" else None
        if head is not None:
            metadata["format"] = self.form
        return OutputValue(chunk.modality, metadata, head, spans)

    def base64(self, value: OutputValue) -> Iterator[bytes]:
        """The Base64 text of a value's bytes, or of its file, piece by piece."""
        data = self._spool.blocks(value.spans)
        if value.head is not None:
            data = file_of(self.form, value.head, data, value.nbytes)
        return base64_of(data)

    def bytes_of(self, value: OutputValue) -> bytes:
        """A value's bytes, all at once."""
        return b"".join(self.blocks(value))

    def blocks(self, value: OutputValue) -> Iterator[bytes]:
        """A value's bytes, in blocks."""
        return self._spool.blocks(value.spans)

    def forget_sent(self) -> None:
        """Free the bytes of all values, unless one is incomplete."""
        if not self._pieces.incomplete:
            self._spool.clear()

    def close(self) -> None:
        """Free everything."""
        self._spool.clear()
