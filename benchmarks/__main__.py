"""`python -m benchmarks [NAME...]`: measure, and print what was found, ratios first.

Without names everything but `gpu`: ours beside others' engines, and then, in a second report, ours alone.

`peers` installs gigabytes of others' software the first time, and has options: `python -m benchmarks peers
--help`. `gpu` needs a GPU, and ends with 2 where there is none.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

from benchmarks import (
    beside,
    events,
    gpu,
    guided,
    handoff,
    hop,
    log,
    mixed,
    nats_kills,
    overload,
    prefix,
    replay,
    scheduler,
    serving,
    speculate,
    speech,
    start,
)
from benchmarks.machine import described
from benchmarks.peers import session
from benchmarks.report import Figure, show

MEASUREMENTS: Final[dict[str, Callable[[], list[Figure]]]] = {
    "serving": serving.measure,
    "hop": hop.measure,
    "events": events.measure,
    "replay": replay.measure,
    "start": start.measure,
    "speech": speech.measure,
    "beside": beside.measure,
    "prefix": prefix.measure,
    "mixed": mixed.measure,
    "scheduler": scheduler.measure,
    "speculate": speculate.measure,
    "guided": guided.measure,
    "overload": overload.measure,
    "kills": nats_kills.measure,
}
TABLES: Final[dict[str, Callable[[], None]]] = {"handoff": handoff.main, "log": log.main}
"""These print their own."""


def main() -> None:
    match sys.argv[1:]:
        case ["gpu"]:
            gpu.main()
        case ["peers", *options]:
            _beside_others(options)
        case names:
            _ours(names)


def _beside_others(options: list[str]) -> None:
    # Ended by a signal or by Ctrl-C, it has peers to wake and to stop: asleep they would stay for ever.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    session.main(options)
    signal.signal(signal.SIGTERM, before)


def _ours(given: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*MEASUREMENTS, *TABLES]
    told = f"of {', '.join(known)}; or `peers` or `gpu`, each alone; default: all but `gpu`"
    parser.add_argument("names", nargs="*", metavar="NAME", help=told)
    names = parser.parse_args(given).names
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"unknown {unknown}: expected some of {known}; `peers` and `gpu` stand alone")
    if not names:
        _beside_others([])
        print("\nours alone", flush=True)
        names = known
    print(described())
    begun_s = time.perf_counter()
    show({name: measure() for name, measure in MEASUREMENTS.items() if name in names})
    for name in TABLES:
        if name in names:
            print(name)
            TABLES[name]()
    print(f"measured in {time.perf_counter() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
