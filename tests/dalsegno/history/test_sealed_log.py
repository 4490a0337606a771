"""A log is verified while its conductor goes on storing records, seals and anchors."""

from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dalsegno.history import sealed_log
from shared.log.port import LogState, StoredRecord
from shared.sealing import anchors, seals
from tests.shared.sealing.sealed_log import CREATED_NS, KEY, SUBJECTS, SealedLog


class Growing:
    """A log to which `grow` adds before and after each read."""

    def __init__(self, records: list[StoredRecord], grow: Callable[[], None]) -> None:
        self._records = records
        self._grow = grow

    async def state(self) -> LogState:
        self._grow()
        last = len(self._records)
        state = LogState(first_seq=1, last_seq=last, created_ns=CREATED_NS, messages=last, bytes=0)
        self._grow()
        return state

    async def history(
        self, subjects: Sequence[str], start_seq: int = 1, end_seq: int | None = None
    ) -> AsyncGenerator[StoredRecord, None]:
        self._grow()
        found = self._records[start_seq - 1 : end_seq]
        if list(subjects) == [SUBJECTS.sealed]:
            found = [record for record in found if record.subject == SUBJECTS.sealed]
        self._grow()
        for record in found:
            yield record


async def test_a_log_that_grows_while_it_is_verified_is_as_it_was_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = SealedLog()
    file = tmp_path / f"{SUBJECTS.stream}-{CREATED_NS}.jsonl"
    monkeypatch.setenv("DALSEGNO_SEALING_ANCHOR_DIR", str(tmp_path))

    def grow() -> None:
        sealed.request(f"r{len(sealed.records)}")
        sealed.seal()
        with file.open("ab") as kept:
            kept.write(anchors.encode(anchors.anchor_of(seals.read(sealed.seals[-1]))))

    log: Any = Growing(sealed.records, grow)

    report, begin = await sealed_log.verified(log, SUBJECTS, frozenset([KEY.public]))

    assert begin.anchor_files == [file]
    assert report.anchors > 0
    assert report.seals > report.anchors
    assert report.sealed > 0
    assert [finding for finding in report.findings if finding.kind != "unsealed_tail"] == []
    assert begin.extent.last_seq < len(sealed.records)
