"""The file that is to blame for missing records; blocks are written here as JetStream writes them."""

import struct
from pathlib import Path

import pytest

from shared.log.nats.store_files import StoreFiles

RECORD = 64


def store(folder: Path, blocks: dict[int, range]) -> Path:
    msgs = folder / "jetstream" / "$G" / "streams" / "DS_LOG" / "msgs"
    msgs.mkdir(parents=True)
    for number, seqs in blocks.items():
        records = (struct.pack("<IQ", RECORD, seq).ljust(RECORD, b"\0") for seq in seqs)
        (msgs / f"{number}.blk").write_bytes(b"".join(records))
    (msgs / "index.db").write_bytes(b"index")
    return msgs


WHOLE = {1: range(1, 11), 2: range(11, 21), 3: range(21, 31)}


def test_a_whole_store_does_not_look_damaged(tmp_path: Path) -> None:
    store(tmp_path, WHOLE)
    files = StoreFiles(tmp_path, "DS_LOG")
    assert not files.looks_damaged
    assert files.has_records


def test_an_expired_beginning_does_not_look_damaged(tmp_path: Path) -> None:
    store(tmp_path, {2: WHOLE[2], 3: WHOLE[3]})
    assert not StoreFiles(tmp_path, "DS_LOG").looks_damaged


@pytest.mark.parametrize(
    ("blocks", "missing", "blame"),
    [
        ({1: WHOLE[1], 3: WHOLE[3]}, (11, 20), "2.blk is missing"),
        ({1: WHOLE[1], 2: range(0), 3: WHOLE[3]}, (11, 20), "2.blk has no records"),
        ({1: WHOLE[1], 2: WHOLE[2]}, (21, 30), "3.blk is missing"),
        ({1: range(1, 6), 2: WHOLE[2]}, (6, 10), "1.blk is damaged or cut off"),
        ({}, (1, 30), "no file in"),
    ],
)
def test_the_file_is_named(
    tmp_path: Path, blocks: dict[int, range], missing: tuple[int, int], blame: str
) -> None:
    store(tmp_path, blocks)
    assert blame in StoreFiles(tmp_path, "DS_LOG").blame(*missing)


def test_a_last_block_that_ends_within_a_record_is_cut_off(tmp_path: Path) -> None:
    last = store(tmp_path, WHOLE) / "3.blk"
    last.write_bytes(last.read_bytes()[: 5 * RECORD + 7])
    files = StoreFiles(tmp_path, "DS_LOG")
    assert files.looks_damaged
    assert "3.blk is damaged or cut off" in files.blame(26, 30)


def test_an_index_without_any_block_looks_damaged(tmp_path: Path) -> None:
    store(tmp_path, {})
    files = StoreFiles(tmp_path, "DS_LOG")
    assert files.looks_damaged
    assert not files.has_records


def test_the_index_is_restored(tmp_path: Path) -> None:
    index = store(tmp_path, WHOLE) / "index.db"
    files = StoreFiles(tmp_path, "DS_LOG")
    index.write_bytes(b"of a server that has forgotten")
    files.restore_index()
    assert index.read_bytes() == b"index"
