"""The report's figures, computed from the times of all tokens: ratios first, then each peer's figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, repeat
from math import ceil
from statistics import median
from typing import Final

from benchmarks.report import RATIO, Figure, spread

OURS: Final = "ours"
ALONE: Final = "engine alone"


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that were sent at the same time.

    Attributes:
        arrivals: for each request, the seconds until each token.
        texts: the answers, with a space before each token.
    """

    arrivals: list[list[float]]
    texts: list[str]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens through the whole time, including the prompts."""
        return sum(map(len, self.arrivals)) / max(times[-1] for times in self.arrivals)

    @property
    def decode_tokens_per_s(self) -> float:
        """The number of requests through the median time between two tokens."""
        return len(self.arrivals) / self.gap_s

    @property
    def first_s(self) -> float:
        return median(times[0] for times in self.arrivals)

    @property
    def gap_s(self) -> float:
        """The median time between two tokens; those that arrive together share the time before them."""
        return median(gap for times in self.arrivals for gap in _shared_gaps(times))

    @property
    def long_gap_s(self) -> float:
        """The 99th percentile of the times between two tokens of a request."""
        gaps = sorted(self._gaps)
        return gaps[ceil(0.99 * len(gaps)) - 1]

    def agreeing(self, other: "Wave") -> float:
        """The share of tokens that equal those of `other`, up to the first difference."""
        pairs = zip(self.texts, other.texts, strict=True)
        same = [_agreeing(mine.split(), others.split()) for mine, others in pairs]
        return sum(same) / sum(map(len, self.arrivals))

    @property
    def _gaps(self) -> list[float]:
        return [after - before for times in self.arrivals for before, after in pairwise(times)]


def _shared_gaps(times: Sequence[float]) -> Iterator[float]:
    tokens = [(time, len(list(together))) for time, together in groupby(times)]
    for (before, _), (after, count) in pairwise(tokens):
        yield from repeat((after - before) / count, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of one peer: its waves, by number of concurrent requests.

    Attributes:
        ready_s: seconds from its start until it was ready for requests.
        is_server: it is an HTTP server and was measured over HTTP.
    """

    ready_s: float
    is_server: bool
    waves: Mapping[int, list[Wave]]


def report(
    found: Mapping[str, Measured], bytes_per_s: Sequence[float], bytes_per_step: int
) -> dict[str, list[Figure]]:
    """Compute all figures by peer; `bytes_per_s` are the read bandwidths before each turn."""
    rivals = {name: one for name, one in found.items() if name not in {OURS, ALONE}}
    figures = {"memory": _memory(bytes_per_s, bytes_per_step)}
    if OURS in found:
        figures["compared"] = _compared(found[OURS], rivals, found.get(ALONE))
    limit = max(bytes_per_s) / bytes_per_step
    return figures | {name: _own(name, one, limit, found.get(OURS)) for name, one in found.items()}


def _compared(ours: Measured, rivals: Mapping[str, Measured], alone: Measured | None) -> list[Figure]:
    figures: list[Figure] = []
    for clients, waves in ours.waves.items():
        at = f"{clients} at a time"
        others = {name: one.waves[clients] for name, one in rivals.items()}
        if others:
            figures += [
                _most(f"{at}: output tokens/s, ours / the best", waves, others, "tokens_per_s"),
                _most(f"{at}: decode tokens/s, ours / the best", waves, others, "decode_tokens_per_s"),
                _fastest_first(f"{at}: first token, ours / the fastest", waves, others),
            ]
        if alone is not None:
            pairs = zip(waves, alone.waves[clients], strict=True)
            figures.append(
                spread(
                    f"{at}: output tokens/s, served / engine alone",
                    [served.tokens_per_s / called.tokens_per_s for served, called in pairs],
                    RATIO,
                    "target: at least 0.97 at 8 and 32",
                )
            )
        figures.append(
            spread(
                f"{at}: between tokens, p99 / p50, ours",
                [wave.long_gap_s / wave.gap_s for wave in waves],
                RATIO,
                "target: below 2",
            )
        )
    servers = {name: one.ready_s for name, one in rivals.items() if one.is_server}
    if servers:
        name = min(servers, key=servers.__getitem__)
        note = f"{ours.ready_s:.1f} s; {name}: {servers[name]:.1f} s"
        figures.append(
            Figure("ready to serve, ours / the fastest server", ours.ready_s / servers[name], RATIO, note)
        )
    return figures


def _most(name: str, ours: list[Wave], others: Mapping[str, list[Wave]], what: str) -> Figure:
    rates = {rival: [getattr(wave, what) for wave in waves] for rival, waves in others.items()}
    best = max(rates, key=lambda rival: median(rates[rival]))
    mine = [getattr(wave, what) for wave in ours]
    ratios = [one / other for one, other in zip(mine, rates[best], strict=True)]
    return spread(name, ratios, RATIO, f"{median(mine):.1f}; {best}: {median(rates[best]):.1f}")


def _fastest_first(name: str, ours: list[Wave], others: Mapping[str, list[Wave]]) -> Figure:
    firsts = {rival: [wave.first_s for wave in waves] for rival, waves in others.items()}
    best = min(firsts, key=lambda rival: median(firsts[rival]))
    mine = [wave.first_s for wave in ours]
    ratios = [one / other for one, other in zip(mine, firsts[best], strict=True)]
    note = f"{1e3 * median(mine):.0f} ms; {best}: {1e3 * median(firsts[best]):.0f} ms; target: at most 1"
    return spread(name, ratios, RATIO, note)


def _own(name: str, one: Measured, limit: float, ours: Measured | None) -> list[Figure]:
    figures = [Figure("from start to ready", one.ready_s, "s", "target: below 10" if name == OURS else "")]
    for clients, waves in one.waves.items():
        at = f"{clients} at a time"
        figures += [
            spread(f"{at}: output tokens/s", [wave.tokens_per_s for wave in waves], "/s"),
            spread(f"{at}: decode tokens/s", [wave.decode_tokens_per_s for wave in waves], "/s"),
            spread(f"{at}: first token, p50", [1e3 * wave.first_s for wave in waves], "ms"),
            spread(f"{at}: between tokens, p50", [1e3 * wave.gap_s for wave in waves], "ms"),
            spread(f"{at}: between tokens, p99", [1e3 * wave.long_gap_s for wave in waves], "ms"),
        ]
        if name != OURS:
            ratios = [wave.long_gap_s / wave.gap_s for wave in waves]
            figures.append(spread(f"{at}: between tokens, p99 / p50", ratios, ""))
        if clients == 1:
            shares = [100 * wave.decode_tokens_per_s / limit for wave in waves]
            figures.append(spread(f"{at}: decode, share of the memory limit", shares, "%"))
        if ours is not None and one is not ours:
            pairs = zip(waves, ours.waves[clients], strict=True)
            same = [100 * wave.agreeing(others) for wave, others in pairs]
            figures.append(spread(f"{at}: tokens equal to ours, up to the first difference", same, "%"))
    return figures


def _memory(bytes_per_s: Sequence[float], bytes_per_step: int) -> list[Figure]:
    note = f"at the fastest read; a token reads {bytes_per_step / 1e6:.1f} MB of weights"
    return [
        spread(
            "read bandwidth of all cores, before each turn", [speed / 1e9 for speed in bytes_per_s], "GB/s"
        ),
        Figure("memory limit of tokens/s, 1 at a time", max(bytes_per_s) / bytes_per_step, "/s", note),
    ]


def _agreeing(mine: Sequence[str], others: Sequence[str]) -> int:
    pairs = enumerate(zip(mine, others, strict=True))
    return next((at for at, (one, other) in pairs if one != other), len(mine))
