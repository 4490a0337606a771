from collections.abc import AsyncIterator

from dalsegno.history import command
from shared.events import Inputs, RequestSubmitted, encode
from shared.log.port import StoredRecord
from shared.subjects import Subjects

SUBJECTS = Subjects()


async def lines(*records: StoredRecord) -> list[str]:
    async def stored() -> AsyncIterator[StoredRecord]:
        for record in records:
            yield record

    return [line async for line in command._lines(stored(), SUBJECTS, as_json=False)]


async def test_what_a_client_wrote_cannot_steer_the_terminal_it_is_shown_in() -> None:
    evil = "\x1b[2J\r\nevil"
    event = RequestSubmitted(model=evil, writer=evil, inputs=Inputs(text=evil))
    shown = await lines(
        StoredRecord(1, SUBJECTS.request("r1"), encode(event), 0),
        StoredRecord(2, SUBJECTS.request(evil), b"junk", 1),
    )
    assert len(shown) == 2
    assert all(line.isprintable() for line in shown)
    assert r"\x1b[2J\r\nevil" in shown[0]
