"""Estimates of the room that requests take in the KV cache, which `dalsegno check` prints. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The most room of one kind of request, in a family whose requests run programs.

    Attributes:
        what: the kind, such as "an image of 1024 x 1024 pixels".
        tokens: in the KV cache at a time, in all contexts of the request.
        numbers: the numbers in the keys and values of a token; 0: those of the checkpoint's language model.
        stored: the dtype of the weights, where `numbers` is given.
    """

    what: str
    tokens: int
    numbers: int = 0
    stored: str = ""
