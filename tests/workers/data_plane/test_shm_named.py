from pathlib import Path

import msgspec
import pytest

from shared.errors import TensorGone
from tests.workers.data_plane.contract import OWNER, READER, ProcessContract, TransportContract, folder
from tests.workers.data_plane.kinds import KINDS
from tests.workers.data_plane.other import filled
from workers.data_plane.store import open_store
from workers.data_plane.transports.shm_named import NamedShmCard, NamedShmTransport

__all__ = ["folder"]


class TestNamedShm(TransportContract, ProcessContract):
    kind = "shm_named"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"boot": "another"}, "no transport reaches it"),
        ({"device": 1 << 40}, "no transport reaches it"),
        ({"path": "/nowhere/at/all"}, "no transport reaches it"),
        ({"path": "/dev/shm/dalsegno-arena-none"}, "is gone, and its memory with it"),
        ({"epoch": 5}, "another arena stands in the place"),
    ],
)
async def test_a_card_that_leads_elsewhere_leads_to_no_tensor(
    folder: Path, change: dict[str, int | str], why: str
) -> None:
    owner, reader = (KINDS["shm_named"](1 << 20, folder) for _ in range(2))
    owner.adopt(*OWNER)
    reader.adopt(*READER)
    card = msgspec.msgpack.decode(owner.cards["shm_named"], type=NamedShmCard)
    changed = msgspec.msgpack.encode(msgspec.structs.replace(card, **change))
    reader.meet(*OWNER, {"shm_named": changed})
    with pytest.raises(TensorGone, match=why):
        await reader.get(owner.put("key", "uint8", (5000,), filled(7, 5000), scope="r"))
    await reader.close()
    await owner.close()


async def test_a_store_without_a_name_reads_others_and_is_not_read_this_way(folder: Path) -> None:
    owner = KINDS["shm_named"](1 << 20, folder)
    owner.adopt(*OWNER)
    reader = open_store(total_bytes=1 << 20, transports=[NamedShmTransport])
    reader.adopt(*READER)
    assert reader.cards == {}
    reader.meet(*OWNER, owner.cards)
    handle = owner.put("key", "uint8", (5000,), filled(7, 5000), scope="r")
    assert (await reader.get(handle) == 7).all()
    await reader.close()
    await owner.close()
