"""`python -m benchmarks [NAME...]`: run benchmarks and print their figures, ratios first.

Without names it runs everything but `gpu`, in two reports: compared with other engines, then on its own.

`peers` installs several gigabytes of other software the first time and has options: `python -m benchmarks
peers --help`. `gpu` needs a GPU; without one it exits with status 2.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

from benchmarks import (
    actions,
    beside,
    diffusion,
    encoders,
    events,
    floods,
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
    rollouts,
    scheduler,
    serving,
    speculate,
    speech,
    start,
    vision,
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
    "vision": vision.measure,
    "encoders": encoders.measure,
    "actions": actions.measure,
    "rollouts": rollouts.measure,
    "beside": beside.measure,
    "prefix": prefix.measure,
    "mixed": mixed.measure,
    "scheduler": scheduler.measure,
    "speculate": speculate.measure,
    "diffusion": diffusion.measure,
    "guided": guided.measure,
    "floods": floods.measure,
    "overload": overload.measure,
    "kills": nats_kills.measure,
}
TABLES: Final[dict[str, Callable[[], None]]] = {"handoff": handoff.main, "log": log.main}
"""Benchmarks that print their own table."""


def main() -> None:
    match sys.argv[1:]:
        case ["gpu"]:
            gpu.main()
        case ["peers", *options]:
            _compare_with_others(options)
        case names:
            _on_its_own(names)


def _compare_with_others(options: list[str]) -> None:
    # After SIGTERM as after Ctrl-C, the stopped peers must be woken and ended: otherwise they stay for ever.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    session.main(options)
    signal.signal(signal.SIGTERM, before)


def _on_its_own(given: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*MEASUREMENTS, *TABLES]
    names_help = f"of {', '.join(known)}; or `peers` or `gpu` alone; default: all but `gpu`"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names_help)
    names = parser.parse_args(given).names
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"unknown {unknown}: expected some of {known}; give `peers` or `gpu` alone")
    if not names:
        _compare_with_others([])
        print("\nDal Segno on its own", flush=True)
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
