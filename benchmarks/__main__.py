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
from importlib import import_module
from typing import Final, TypeVar

from benchmarks.machine import described
from benchmarks.peers import session
from benchmarks.report import Figure, show

_Result = TypeVar("_Result")
_NAMES: Final = (
    *(
        "serving",
        "hop",
        "events",
        "replay",
        "start",
        "speech",
        "speech_streams",
        "vision",
        "encoders",
        "actions",
        "rollouts",
    ),
    *("images", "pipelines", "beside", "prefix", "mixed", "scheduler", "speculate", "diffusion", "guided"),
    *("floods", "overload", "studio", "what_if", "recording"),
)


def _later(module: str, function: str, result: type[_Result]) -> Callable[[], _Result]:
    """A function that imports a benchmark when it runs: together they need every large library there is."""

    def run() -> _Result:
        found: _Result = getattr(import_module(f"benchmarks.{module}"), function)()
        return found

    return run


MEASUREMENTS: Final[dict[str, Callable[[], list[Figure]]]] = {
    **{name: _later(name, "measure", list[Figure]) for name in _NAMES},
    "kills": _later("nats_kills", "measure", list[Figure]),
}
TABLES: Final[dict[str, Callable[[], None]]] = {
    name: _later(name, "main", type(None)) for name in ("handoff", "log")
}
"""Benchmarks that print their own table."""


def main() -> None:
    match sys.argv[1:]:
        case ["gpu", *options]:
            import_module("benchmarks.gpu").main(options)
        case ["gpu-first", *options]:
            import_module("benchmarks.gpu_first").main(options)
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
