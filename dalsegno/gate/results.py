"""The result of one level over one source. Pure data, which processes send one another."""

import msgspec

from dalsegno.gate.differences import Difference, Level


class Examined(msgspec.Struct, kw_only=True):
    """The result of repeating a source's decisions or data: the number compared, and the differences.

    Attributes:
        decided: by request, the number of its decisions (of data: of its values) that were compared.
        cannot: by request, the reason why it cannot be repeated here.
        whole: the reason why this level can repeat nothing of the source; empty if it can.
        notes: further lines for the report.
    """

    level: Level
    source: str
    decided: dict[str, int] = {}
    differences: list[Difference] = []
    cannot: dict[str, str] = {}
    whole: str = ""
    notes: list[str] = []
