from pathlib import Path

import msgspec
import pytest

from shared.errors import TensorGone
from tests.workers.data_plane.contract import OWNER, READER, ProcessContract, TransportContract, folder
from tests.workers.data_plane.kinds import KINDS
from tests.workers.data_plane.other import filled
from workers.data_plane.store import open_store
from workers.data_plane.transports.shm_named import NamedShmEndpoint, NamedShmTransport

__all__ = ["folder"]


class TestNamedShm(TransportContract, ProcessContract):
    kind = "shm_named"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"boot": "another"}, "there is no transport to it"),
        ({"device": 1 << 40}, "there is no transport to it"),
        ({"path": "/nowhere/at/all"}, "there is no transport to it"),
        ({"path": "/dev/shm/dalsegno-arena-none"}, "is gone, and its memory with it"),
        ({"epoch": 5}, "another arena stands in the place"),
    ],
)
async def test_a_card_that_leads_elsewhere_leads_to_no_tensor(
    folder: Path, change: dict[str, int | str], why: str
) -> None:
    owner, reader = (KINDS["shm_named"](1 << 20, folder) for _ in range(2))
    owner.begin_incarnation(*OWNER)
    reader.begin_incarnation(*READER)
    endpoint = msgspec.msgpack.decode(owner.endpoints["shm_named"], type=NamedShmEndpoint)
    changed = msgspec.msgpack.encode(msgspec.structs.replace(endpoint, **change))
    reader.add_peer(*OWNER, {"shm_named": changed})
    with pytest.raises(TensorGone, match=why):
        await reader.get(owner.put("key", "uint8", (5000,), filled(7, 5000), scope="r"))
    await reader.close()
    await owner.close()


async def test_a_store_without_a_name_reads_others_and_is_not_read_this_way(folder: Path) -> None:
    owner = KINDS["shm_named"](1 << 20, folder)
    owner.begin_incarnation(*OWNER)
    reader = open_store(total_bytes=1 << 20, transports=[NamedShmTransport])
    reader.begin_incarnation(*READER)
    assert reader.endpoints == {}
    reader.add_peer(*OWNER, owner.endpoints)
    handle = owner.put("key", "uint8", (5000,), filled(7, 5000), scope="r")
    assert (await reader.get(handle) == 7).all()
    await reader.close()
    await owner.close()
