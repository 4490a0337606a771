"""Simulated CUDA streams: each launch records which work was done before it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@dataclass(eq=False)
class Stream:
    """One of `torch.cuda.Stream`.

    Attributes:
        done: what has been launched on it, or had been on a stream that it waited for.
    """

    device: Any = None
    priority: int = 0
    done: set[str] = field(default_factory=set)

    def wait_stream(self, other: "Stream") -> None:
        self.done |= other.done


@dataclass(frozen=True)
class Launch:
    """A launch, its stream and its priority; `behind` is the work done before it."""

    what: str
    stream: Stream
    priority: int
    behind: set[str]


class PretendedStreams:
    """The stream functions of `torch.cuda`.

    Attributes:
        default: the stream that threads begin on.
        launched: in order.
    """

    def __init__(self) -> None:
        self.default = Stream()
        self.launched: list[Launch] = []
        self._threads = threading.local()
        self._recording: list[Launch] | None = None

    @property
    def current(self) -> Stream:
        stream: Stream = getattr(self._threads, "stream", self.default)
        return stream

    def launch(self, what: str, priority: int | None = None) -> None:
        """Launch on the calling thread's stream; `priority` is given for a recording."""
        stream = self.current
        one = Launch(what, stream, stream.priority if priority is None else priority, set(stream.done))
        if self._recording is not None:
            self._recording.append(one)
            return
        stream.done.add(what)
        self.launched.append(one)

    def set(self, stream: Stream) -> None:
        self._threads.stream = stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        outside = self.current
        self.set(stream)
        yield
        self.set(outside)

    @contextmanager
    def recording(self, graph: Any, *, stream: Stream, **_: Any) -> Iterator[None]:
        """Like `torch.cuda.graph`: nothing runs, and each launch keeps its stream's priority."""
        self._recording = []
        with self.on(stream):
            yield
        recorded, self._recording = self._recording, None

        def replay() -> None:
            for one in recorded:
                self.launch(one.what, one.priority)

        graph.replay = replay


def pretend(monkeypatch: pytest.MonkeyPatch) -> PretendedStreams:
    """In the place of CUDA's, for all threads."""
    streams = PretendedStreams()
    for name, instead in {
        "Stream": Stream,
        "current_stream": lambda device=None: streams.current,
        "set_stream": streams.set,
        "stream": streams.on,
        "device": lambda device: streams.on(streams.current),
        "graph": streams.recording,
        "graph_pool_handle": lambda: None,
        "CUDAGraph": SimpleNamespace,
    }.items():
        monkeypatch.setattr(torch.cuda, name, instead)
    return streams
