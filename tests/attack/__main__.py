"""`python -m tests.attack [FAMILY...]`: attacks a deployment, and prints a table of promises.

    guides forgery              these families; all of them by default, in ten minutes
    --seconds 600               so long may the random kills take
    --seed 7                    of what is random

Status 0: every promise was held. The table is also in the folder `--out`.
"""

import argparse
import asyncio
import inspect
import logging
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tests.attack.promises import Verdict, table

OUT: Final = Path("build/attack")
FAMILIES: Final = (
    "origins",
    "forgery",
    "tampering",
    "weights",
    "guides",
    "resources",
    "readers",
    "kills",
)


def main() -> int:
    """Attack; return the exit status."""
    wanted = parse()
    shutil.rmtree(wanted.out, ignore_errors=True)
    wanted.out.mkdir(parents=True)
    logging.basicConfig(filename=wanted.out / "attacks.log", level=logging.INFO)
    verdicts: list[tuple[str, Verdict]] = []
    for family in wanted.families:
        began_s = time.monotonic()
        found = _attacked(family, wanted.out / family, {"seed": wanted.seed, "seconds": wanted.seconds})
        verdicts += [(family, verdict) for verdict in found]
        held = sum(verdict.is_held for verdict in found)
        took_s = time.monotonic() - began_s
        print(
            f"{time.strftime('%H:%M:%S')} {family}: {held} of {len(found)} held, {took_s:.0f} s", flush=True
        )
        for verdict in found:
            for one in verdict.breaks[:3]:
                print(f"    {one!s:.600}", flush=True)
    told = table(verdicts)
    (wanted.out / "attack.md").write_text(told + "\n")
    print(f'\n{told}\n\nAlso in {wanted.out}/attack.md. Again: make attack ARGS="FAMILY"')
    return 0 if all(verdict.is_held for _, verdict in verdicts) else 1


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments; those of the process by default."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--seconds", type=float, default=120.0, help="for the random kills")
    parser.add_argument("--seed", type=int, default=None, help="by default the time")
    parser.add_argument("--out", type=Path, default=OUT)
    wanted = parser.parse_args(args)
    if unknown := set(wanted.families) - set(FAMILIES):
        parser.error(f"unknown family {', '.join(sorted(unknown))}: expected {', '.join(FAMILIES)}")
    wanted.families = wanted.families or list(FAMILIES)
    wanted.seed = int(time.time()) if wanted.seed is None else wanted.seed
    wanted.out = wanted.out.absolute()
    return wanted


def _attacked(family: str, out: Path, options: Mapping[str, Any]) -> list[Verdict]:
    """The verdicts of a family; an attack that cannot be made is not a promise that was held."""
    attack = import_module(f"tests.attack.{family}").attack
    accepted = {name: options[name] for name in inspect.signature(attack).parameters if name in options}
    try:
        found: list[Verdict] = asyncio.run(attack(out, **accepted))
    except Exception as error:
        (out.parent / f"{family}.txt").write_text(traceback.format_exc())
        return [Verdict(f"the attacks of {family}", missing=f"{type(error).__name__}: {error}")]
    return found


if __name__ == "__main__":
    sys.exit(main())
