"""NATS' nkeys: Ed25519 keys as text, and signatures of a server's challenge. No I/O.

A seed (`SU...`) is the secret; the public key (`U...`) is listed in the server's configuration. Both are
base32 of a type, 32 bytes and a checksum (github.com/nats-io/nkeys). `cryptography` implements Ed25519; it
is imported only if a key is used, because most deployments use none.
"""

import base64
import binascii
import secrets
from typing import Final

_SEED: Final = 18 << 3
_USER: Final = 20 << 3
_KEY_BYTES: Final = 32


class SeedError(ValueError):
    """A text that is not a user's seed; the message does not quote it."""


def new_seed() -> str:
    """Return a new random seed of a user."""
    # The type's bits span two bytes, so that the text starts with S and the type's letter.
    return _encoded(bytes((_SEED | _USER >> 5, (_USER & 31) << 3)) + secrets.token_bytes(_KEY_BYTES))


def public_key(seed: str) -> str:
    """Return the public key of a user's seed.

    Raises:
        SeedError: the seed is invalid.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

    key = Ed25519PrivateKey.from_private_bytes(_raw(seed)).public_key()
    return _encoded(bytes((_USER,)) + key.public_bytes_raw())


def sign(seed: str, nonce: str) -> bytes:
    """Return the signature of a server's challenge, in base64.

    Raises:
        SeedError: the seed is invalid.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

    return base64.b64encode(Ed25519PrivateKey.from_private_bytes(_raw(seed)).sign(nonce.encode()))


def _encoded(body: bytes) -> str:
    checksum = binascii.crc_hqx(body, 0).to_bytes(2, "little")
    return base64.b32encode(body + checksum).decode().rstrip("=")


def _raw(seed: str) -> bytes:
    try:
        whole = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except (binascii.Error, ValueError):
        raise SeedError("expected an nkey's seed: capital letters and digits, starting with SU") from None
    body, checksum = whole[:-2], whole[-2:]
    if binascii.crc_hqx(body, 0).to_bytes(2, "little") != checksum:
        raise SeedError("expected an nkey's seed, but its checksum is wrong: is it complete?")
    head, raw = body[:2], body[2:]
    if head != bytes((_SEED | _USER >> 5, (_USER & 31) << 3)) or len(raw) != _KEY_BYTES:
        raise SeedError("expected the seed of a user's nkey, starting with SU; found another type of key")
    return raw
