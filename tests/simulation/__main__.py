"""Run one history, or many: `python -m tests.simulation --seed 7 --story` or `--seeds 10000`.

With `--many-ranks` of a model on several.
"""

import argparse
import sys

from dalsegno import story
from tests.simulation.invariants import check
from tests.simulation.many_ranks import ManyRanks
from tests.simulation.simulator import Simulation


def main() -> None:
    """Exit with status 1 at the first history that breaks an invariant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--many-ranks", action="store_true", help="of a model on several ranks")
    parser.add_argument("--story", action="store_true", help="tell what happened")
    told = parser.parse_args()
    for seed in range(told.seed, told.seed + told.seeds):
        simulation = ManyRanks(seed) if told.many_ranks else Simulation(seed)
        try:
            check(simulation.run())
        except AssertionError as error:
            print(error, file=sys.stderr)
            sys.exit(1)
        finally:
            if told.story:
                tell(simulation)
    print(f"{told.seeds} histories from seed {told.seed}: all invariants hold")


def tell(simulation: Simulation) -> None:
    """The log, record by record, and the accidents."""
    for record, event in zip(simulation.records, simulation.decoded, strict=True):
        head = f"{record.seq:>5} {event.request_id or '':<4} {story.who(event):<14}"
        print(f"{head} {story.what(event)}: {story.why(event)}")
    print(*simulation.story, sep="\n")


if __name__ == "__main__":
    main()
