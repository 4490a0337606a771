"""Digests of events and of their values, equal for equal values."""

import hashlib

import msgspec

from shared.events.requests import RequestSubmitted


def submission_digest(event: RequestSubmitted) -> str:
    """Return the digest that identifies equal requests: of model, inputs, parameters. Hex, 32 characters."""
    # Parameters as a plain map: a struct's encoded header depends on its number of fields, which grows.
    return digest_of((event.model, event.inputs, msgspec.to_builtins(event.params)))


def digest_of(value: object) -> str:
    """Return a digest of any encodable value, equal for equal values. Hex, 32 characters."""
    return hashlib.blake2b(msgspec.msgpack.encode(value, order="sorted"), digest_size=16).hexdigest()
