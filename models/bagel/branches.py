"""The contexts of a flow as passes: their prompts are computed once, and their steps are not kept.

The first branch computes its whole prompt. The others fork it where their prompts begin alike, and compute
the rest. A fork that ends earlier than the first branch drops what is beyond its end.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Protocol

import torch

from models.bagel.previews import LatentColors
from models.bagel.spans import Kind, Place, shared_places
from models.programs import Mask, Pass

MAX_TEXT: Final = 2048
"""The most tokens of a text that are computed in one pass."""


class FlowNode(Protocol):
    """The part of the KV node that a flow uses (`models.bagel.llm.BagelLM`).

    Attributes:
        latent_channels: the numbers in a latent token.
        colors: of latents, for previews; None: there are none.
    """

    @property
    def latent_channels(self) -> int: ...
    @property
    def colors(self) -> LatentColors | None: ...
    @property
    def device(self) -> torch.device: ...

    def latent_embeds(self, latents: torch.Tensor, time: float, grid: tuple[int, int]) -> torch.Tensor:
        """The embeddings of latents at a time, (n, channels) -> (n + 2, hidden), with two bracket tokens."""
        ...

    def velocity(self, hidden: torch.Tensor) -> torch.Tensor:
        """The velocity of latents, of the states of such a pass: (n + 2, hidden) -> (n, channels) float32."""
        ...


class Branch:
    """One context of a flow.

    Args:
        places: its spans; `ids` and `rows` are the tokens and the rows of images of the whole prompt.
        origin: the branch that it forks; None for the first one.

    Attributes:
        name: the name of its context.
        cells: the number of its tokens, without those of a step.
        shared: the number of them that it has in common with `origin`.
        waiting: the passes that remain until its prompt is computed.
        longest: the most tokens of one of them.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[Place],
        ids: Sequence[int],
        rows: torch.Tensor,
        origin: "Branch | None" = None,
    ) -> None:
        self.places: tuple[Place, ...] = tuple(places)
        same = 0 if origin is None else shared_places(places, origin.places)
        self.name: Final = name
        self.cells: Final = sum(place.span.tokens for place in places)
        self.shared: Final = sum(place.span.tokens for place in places[:same])
        self.waiting: Final = deque(_prompt_passes(name, places[same:], ids, rows))
        self.longest: Final = max((one.tokens for one in self.waiting), default=0)
        self._position = places[-1].next_position if places else 0
        self._origin = origin
        self._is_open = False
        self._done = self.shared

    @property
    def is_ready(self) -> bool:
        """True if its next pass can be computed: the tokens that it shares are."""
        return self._is_open or self._origin is None or self._origin.done >= self.shared

    @property
    def done(self) -> int:
        """The number of its tokens that are computed."""
        return self._done

    def next_prompt_pass(self) -> Pass:
        """Take the next of the waiting passes."""
        found = self._opened(self.waiting.popleft())
        self._done += found.tokens
        return found

    def step_pass(self, embeds: torch.Tensor) -> Pass:
        """A pass over the latents of a step, (n + 2, hidden), behind the prompt."""
        asked = Pass(
            context=self.name,
            embeds=embeds,
            positions=self._position,
            mask=Mask.FULL,
            routes=image_routes(len(embeds)),
        )
        return self._opened(asked)

    def _opened(self, asked: Pass) -> Pass:
        is_first, self._is_open = not self._is_open, True
        if not is_first or self._origin is None or not self.shared:
            return asked
        return replace(asked, forks=self._origin.name, after=self.shared)


def prompt_round(branches: Sequence[Branch]) -> list[Pass]:
    """The next passes over the prompts of branches; none if all are computed."""
    # Asked before any of them goes on: a fork begins with what was committed before the round.
    ready = [one for one in branches if one.waiting and one.is_ready]
    return [one.next_prompt_pass() for one in ready]


def image_routes(tokens: int) -> torch.Tensor:
    """The set of weights of each token of an image to be drawn, (tokens,) int8: its brackets are text."""
    routes = torch.ones(tokens, dtype=torch.int8)
    routes[0] = routes[-1] = 0
    return routes


def _prompt_passes(
    name: str, places: Sequence[Place], ids: Sequence[int], rows: torch.Tensor
) -> Iterator[Pass]:
    """The passes over spans: texts that follow one another together, each image for itself."""
    text: list[int] = []
    for place in places:
        if not place.span.kind.is_image:
            text += ids[place.first : place.first + place.span.tokens]
            continue
        yield from _text_passes(name, text)
        text = []
        embeds = rows[place.first_row : place.first_row + place.span.tokens]
        yield Pass(
            context=name,
            embeds=embeds,
            positions=place.position,
            mask=Mask.FULL,
            commits=True,
            routes=image_routes(len(embeds)) if place.span.kind is Kind.VAE else None,
        )
    yield from _text_passes(name, text)


def _text_passes(name: str, ids: Sequence[int]) -> Iterator[Pass]:
    for begin in range(0, len(ids), MAX_TEXT):
        yield Pass(context=name, ids=ids[begin : begin + MAX_TEXT], commits=True)
