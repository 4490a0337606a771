"""Recorded logs, replayed for ever: whoever changes a decision finds out here which served request it breaks.

    python -m tests.histories.record            records all of them anew, from real deployments
    dalsegno replay tests/histories             replays them

A history that a later version decides otherwise is not recorded anew to make it match: old logs are out
there. It is recorded anew when it shall show something else.
"""

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
WRONG: Final = FOLDER / "wrong"
"""Histories that must not match."""
