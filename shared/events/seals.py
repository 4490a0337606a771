"""The event that seals the log up to a position."""

from shared.events.base import Event


class LogSealed(Event, frozen=True, kw_only=True, omit_defaults=True, tag="log.sealed.v1", tag_field="type"):
    """A signed statement about the records up to a position (ADR 25). No decision depends on it.

    Attributes:
        statement: the signed bytes: a MessagePack map (`shared.sealing.seals.Seal`).
        key: the Ed25519 public key, 32 bytes. It proves nothing about its owner.
        signature: of `dalsegno.log.seal.v1`, a line feed and `statement`; 64 bytes.
    """

    statement: bytes
    key: bytes
    signature: bytes
