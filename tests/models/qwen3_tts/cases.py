"""What the published code and ours are asked to say. Imports nothing: the recorder runs elsewhere."""

from pathlib import Path
from typing import Any, Final

PUBLISHED: Final = Path(__file__).parent / "published.npz"
FRAMES: Final = 36
HEARD: Final = "text"
"""The case whose sound is recorded."""
CASES: Final[dict[str, dict[str, Any]]] = {
    "plain": {"text": "hello there", "speaker": "vivian", "language": "auto"},
    "speaker": {"text": "hello there", "speaker": "ryan", "language": "auto"},
    "language": {"text": "hello there", "speaker": "vivian", "language": "english"},
    "dialect": {"text": "hello there", "speaker": "eric", "language": "chinese"},
    "text": {"text": "what do seven wizards mix?", "speaker": "vivian", "language": "english"},
    "instructed": {
        "text": "hello there",
        "speaker": "vivian",
        "language": "auto",
        "instructions": "speak briefly",
    },
}
