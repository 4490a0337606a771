"""The results of a verification: findings, each with its consequence."""

from enum import StrEnum

import msgspec


class Level(StrEnum):
    """The consequence of a finding.

    `CHANGED`: the records are not those that were sealed, or seals are missing or forged.
    `UNPROVEN`: nothing can be said: there is no seal, or its key is not trusted.
    `NOTE`: explained by the log's normal operation.
    """

    CHANGED = "changed"
    UNPROVEN = "unproven"
    NOTE = "note"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding about the records from `first_seq` to `last_seq`.

    Attributes:
        kind: for programs: `changed_segment`, `changed_request`, `changed_member`, `missing_seals`,
            `contradicting_seals`, `bad_seal`, `foreign`, `wrong_log`, `unknown_key`, `other_history`,
            `truncated`, `removed`, `expired`, `partly_expired`, `inserted`, `gap`, `older_than_sealing`,
            `unsealed`, `unsealed_tail`, `left_out`, `absent`.
        text: for people.
    """

    kind: str
    level: Level
    text: str
    first_seq: int = 0
    last_seq: int = 0
    request_id: str | None = None


def worst(findings: list[Finding]) -> Level:
    """Return the gravest level; `NOTE` if there are no findings."""
    levels = {finding.level for finding in findings}
    return next((level for level in Level if level in levels), Level.NOTE)
