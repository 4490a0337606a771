"""Anchors: copies of a seal's position and chain value outside of the log, one JSON object each. Pure."""

from collections.abc import Iterable

import msgspec

from shared.sealing.seals import SignedSeal


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """A chain value as it was when a seal was stored.

    Attributes:
        stream: the name of the log.
        created_ns: its creation time.
        seq: the position of the seal's record.
        last_seq: the last record that the seal covers.
        last_ns: that record's time.
        chain: the chain value in hex.
        key: the public key in hex.
    """

    stream: str
    created_ns: int
    seq: int
    last_seq: int
    last_ns: int
    chain: str
    key: str


class AnchorFormatError(ValueError):
    """A line that is not an anchor; the message says which."""


def anchor_of(signed: SignedSeal) -> Anchor:
    """Return the anchor of a stored seal."""
    seal = signed.seal
    return Anchor(
        stream=seal.stream,
        created_ns=seal.created_ns,
        seq=signed.seq,
        last_seq=seal.last_seq,
        last_ns=seal.last_ns,
        chain=seal.chain.hex(),
        key=signed.key.hex(),
    )


def encode(anchor: Anchor) -> bytes:
    """Return the anchor as one line."""
    return msgspec.json.encode(anchor) + b"\n"


def read(lines: Iterable[bytes]) -> list[Anchor]:
    """Return the anchors in a file. A line that a crash cut off is skipped.

    Raises:
        AnchorFormatError: a line is not an anchor.
    """
    found = []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"}\n"):
            continue
        try:
            found.append(msgspec.json.decode(line, type=Anchor))
        except (msgspec.MsgspecError, ValueError) as error:
            raise AnchorFormatError(f"line {number} is not an anchor: {error}") from None
    return found
