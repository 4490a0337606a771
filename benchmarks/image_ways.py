"""Ways to draw an image: in this process, or by a server with several clients."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import httpx

from benchmarks.drawing import PROMPT
from benchmarks.turns import together
from configs.files import configs_folder
from tests.e2e.deploy import serve

_ANSWER_S: Final = 900.0


@dataclass(slots=True)
class Rates:
    """Images per second of one way to draw, by round, and the seconds of each image."""

    per_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, rate: float, seconds: Sequence[float]) -> None:
        """Add a round."""
        self.per_s.append(rate)
        self.seconds += seconds

    def over(self, other: "Rates") -> list[float]:
        """The images per second divided by those of another way, by round."""
        return [one / two for one, two in zip(self.per_s, other.per_s, strict=True)]


class Image(Protocol):
    """An image to be drawn.

    Attributes:
        options: its parameters in a request, besides prompt and seed.
    """

    @property
    def options(self) -> Mapping[str, Any]: ...


P = TypeVar("P", bound=Image)
Way = Callable[[P, int], tuple[float, list[float]]]
"""Draws images with a seed for the round: images per second, and the seconds of each."""
Draw = Callable[[P, int], object]
"""Draws an image by a seed in this process."""


def in_turns(ways: Mapping[str, Way[P]], image: P, rounds: int) -> dict[str, Rates]:
    """Draw by all ways in each round; each result is printed at once."""
    found = {name: Rates() for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            rate, seconds = way(image, 1000 * number)
            print(f"round {number + 1}: {name}, {rate:.3g} images/s", flush=True)
            found[name].add(rate, seconds)
    return found


def in_process(draw: Draw[P]) -> Way[P]:
    """The way to draw an image in this process."""

    def way(image: P, seed: int) -> tuple[float, list[float]]:
        begun_s = time.perf_counter()
        draw(image, seed)
        seconds = time.perf_counter() - begun_s
        return 1 / seconds, [seconds]

    return way


def served(url: str, clients: int) -> Way[Image]:
    """The way to draw by a server, with so many clients."""

    def way(image: Image, seed: int) -> tuple[float, list[float]]:
        return together(clients, lambda client: [_asked(url, image, seed + 100 * client)])

    return way


def _asked(url: str, image: Image, seed: int) -> float:
    """Ask for an image; return the seconds.

    Raises:
        RuntimeError: the answer is an error.
    """
    body = {"prompt": PROMPT, "seed": seed, **image.options}
    begun_s = time.perf_counter()
    answer = httpx.post(f"{url}/v1/images/generations", json=body, timeout=_ANSWER_S)
    if answer.status_code != 200:
        raise RuntimeError(f"expected an image, found {answer.status_code}: {answer.text[:500]}")
    return time.perf_counter() - begun_s


def deployed(checkpoint: Path, config: str) -> AbstractContextManager[str]:
    """Serve a checkpoint by one of the named configurations; give the address."""
    settings = (configs_folder() / f"{config}.yaml").read_text()
    return running(f"{settings}\ncheckpoint: {checkpoint}\n")


@contextmanager
def running(configuration: str) -> Iterator[str]:
    """Serve a configuration in YAML; give the address."""
    with tempfile.TemporaryDirectory(prefix="dalsegno-images-") as folder:
        path = Path(folder) / "images.yaml"
        path.write_text(configuration)
        with serve(Path(folder), model=str(path)) as server:
            yield server.url
