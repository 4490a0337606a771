"""Ed25519 keys as text: 64 hexadecimal characters, of the seed and of the public key. No I/O.

`cryptography` is imported only when a key is used.
"""

import binascii
import secrets
from typing import Final

KEY_BYTES: Final = 32


class KeyTextError(ValueError):
    """A text that is not a key; the message does not quote it."""


def new_seed() -> str:
    """Return a new random seed."""
    return secrets.token_hex(KEY_BYTES)


def raw(text: str) -> bytes:
    """Return the bytes of a seed or of a public key.

    Raises:
        KeyTextError: the text is not a key.
    """
    try:
        key = binascii.unhexlify(text.strip())
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise KeyTextError(f"expected a key of {2 * KEY_BYTES} hexadecimal characters")
    return key


class SigningKey:
    """A private key; `public` is its public key."""

    def __init__(self, seed: str) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        self._key = Ed25519PrivateKey.from_private_bytes(raw(seed))
        self.public: Final[bytes] = self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def is_signed(message: bytes, signature: bytes, public: bytes) -> bool:
    """Return whether `signature` is that of `message` by the owner of the `public` key."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def fingerprint(public: bytes) -> str:
    """Return the first characters of a public key, for messages."""
    return public.hex()[:16]
