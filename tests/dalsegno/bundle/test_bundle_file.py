"""A bundle gives back what was put into it, or says which line is not as it was written."""

import contextlib
import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.bundle import bundle_file
from dalsegno.bundle.bundle_file import BundleError
from tests.dalsegno.histories import answered, bundled

SEEN = re.compile(r"line (\d+)|first line")


def written(**how: bool) -> bytes:
    file = io.BytesIO()
    header, kept = bundled(answered(data=b"sound" * 9), **how)
    assert bundle_file.write(file, header, kept) == len(file.getvalue())
    return file.getvalue()


def read(tmp_path: Path, data: bytes) -> bundle_file.Bundle:
    path = tmp_path / "x.bundle"
    path.write_bytes(data)
    return bundle_file.read(str(path))


def refused(tmp_path: Path, data: bytes) -> str:
    with pytest.raises(BundleError) as refusal:
        read(tmp_path, data)
    message = refusal.value.message
    assert "\n" not in message
    assert message.startswith(str(tmp_path / "x.bundle"))
    return message.removeprefix(str(tmp_path / "x.bundle"))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    records = answered(data=b"sound" * 9)
    found = read(tmp_path, written(payloads=True))
    assert found.records == records
    assert found.header.request_id == "r1"
    assert found.header.requests == ["r1"]
    assert found.header.payloads == "kept"
    assert not found.incomplete
    assert [one.digest for one in found.kept] == [bundle_file.digest_of(record.data) for record in records]


def test_a_bundle_is_json_lines_that_others_can_read_and_check() -> None:
    lines = written().decode().splitlines()
    header, *records, last = map(json.loads, lines)
    assert header["bundle"] == 1
    assert "request.finished.v1" in header["schemas"]
    assert records[-1]["event"]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4}
    assert last["end"] == {"records": len(records)}
    chain = ""
    for line in lines:
        body, told = line[: -len('"chain":""}') - 33], json.loads(line)["chain"]
        chain = bundle_file.digest_of((chain + body).encode())
        assert told == chain


def test_the_header_says_what_the_records_are_about() -> None:
    header = json.loads(written().splitlines()[0])
    [about] = header["about"]
    assert (about["outcome"], about["family"], about["attempts"]) == ("finished", "decoder_lm", 1)
    assert about["pins"]["graph"] == "g"
    [tensor] = about["tensors"]
    assert (tensor["key"], tensor["dtype"], tensor["shape"]) == ("r1/token_ids", "int32", [3])
    assert tensor["digest"] == bundle_file.digest_of(b"\1\0\0\0\2\0\0\0\3\0\0\0")
    assert header["configs"] == {"c": None}


def test_payloads_are_left_out_and_what_they_were_is_said(tmp_path: Path) -> None:
    sound = b"sound" * 9
    whole, found = written(payloads=True), read(tmp_path, written())
    [left_out] = [one.left_out for one in found.kept if one.left_out is not None]
    assert (left_out.bytes, left_out.digest) == (len(sound), bundle_file.digest_of(sound))
    assert found.header.payloads == "left out"
    assert found.incomplete == {"r1"}
    assert b"c291bmRz" in whole
    assert b"c291bmRz" not in written()


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_found_and_its_line_is_named() -> None:
    file = io.BytesIO()
    header, kept = bundled(answered())
    bundle_file.write(file, header, [*kept[:6], *kept[-1:]])
    data, line = file.getvalue(), 1
    for place, byte in enumerate(data):
        flipped = data[:place] + bytes([byte ^ 1 << place % 8]) + data[place + 1 :]
        with pytest.raises(BundleError) as refusal:
            bundle_file.read_from("x", io.BytesIO(flipped))
        named = SEEN.search(refusal.value.message)
        assert named is not None, refusal.value.message
        assert (int(named[1]) if named[1] else 1) == line, (place, refusal.value.message)
        line += byte == ord("\n")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            b'"text":"secret1"',
            b'"text":"Secret1"',
            "the event, or its digest, of record 9 on {w0} (output.chunk.v1)",
        ),
        (
            b'"index":1,"text"',
            b'"index":7,"text"',
            "the event, or its digest, of record 9 on {w0} (output.chunk.v1)",
        ),
        (b'"seq":9', b'"seq":10', "the position, time or subject of record 10 on {w0} (output.chunk.v1)"),
        (
            b'"time_ns":9000000',
            b'"time_ns":9000001',
            "the position, time or subject of record 9 on {w0} (output.chunk.v1)",
        ),
        (
            b'"subject":"ds.walk.r1"',
            b'"subject":"ds.walk.r2"',
            "the position, time or subject of record 4 on ds.walk.r2 ",
        ),
        (
            b'"text":"secret1"',
            b'"text":secret1"',
            "record 9 on {w0} (output.chunk.v1), which is not JSON",
        ),
        (b'"request_id":"r1"', b'"request_id":"r2"', "the header"),
        (b'"end":{"records":', b'"end":{"records":1', "the last line"),
    ],
)
def test_the_part_that_was_altered_is_named(old: bytes, new: bytes, said: str, tmp_path: Path) -> None:
    changed = written(payloads=True).replace(old, new, 1)
    assert changed != written(payloads=True)
    message = refused(tmp_path, changed)
    assert f": not as it was exported: {said.format(w0='ds.output.nats.r1.w0')}" in message


def test_an_altered_chain_is_told_from_an_altered_record(tmp_path: Path) -> None:
    lines = written().splitlines(keepends=True)
    lines[4] = re.sub(rb'"chain":"....', b'"chain":"0123', lines[4])
    assert ", line 5: not as it was exported: the chain of record 4 on " in refused(tmp_path, b"".join(lines))


def test_a_dropped_a_swapped_and_a_doubled_line_are_found(tmp_path: Path) -> None:
    lines = written().splitlines(keepends=True)
    for changed in (
        [*lines[:4], *lines[5:]],
        [*lines[:4], lines[5], lines[4], *lines[6:]],
        [*lines[:5], *lines[4:]],
    ):
        assert re.match(", line [567]: not as it was exported", refused(tmp_path, b"".join(changed)))


def test_a_bundle_that_is_cut_off_says_so_wherever_it_is_cut(tmp_path: Path) -> None:
    data = written()
    for end in range(1, len(data) - 1, 41):
        message = refused(tmp_path, data[:end])
        assert " is cut off" in message, (end, message)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", " is empty: expected a bundle"),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), " is not a bundle: expected `dalsegno export`'s first line"),
        (b"[1]\n", " is not a bundle"),
        (b'{"a": 1}\n', " is not a bundle"),
        (b"[" * 100_000 + b"\n", " is not a bundle"),
    ],
)
def test_what_is_no_bundle_is_said_to_be_none(data: bytes, said: str, tmp_path: Path) -> None:
    assert refused(tmp_path, data).startswith(said)


def rechained(lines: list[bytes]) -> bytes:
    chain, told = "", b""
    for line in lines:
        body = re.sub(rb',"chain":"[0-9a-f]*"}\n$', b"", line)
        chain = bundle_file.digest_of(chain.encode() + body)
        told += body + f',"chain":"{chain}"}}\n'.encode()
    return told


def test_a_newer_format_is_refused_with_the_version_that_reads_it(tmp_path: Path) -> None:
    first, *rest = written().splitlines(keepends=True)
    first = first.replace(b'"bundle":1', b'"bundle":2').replace(b'"version":"0.1.0"', b'"version":"7.0.0"')
    message = refused(tmp_path, rechained([first, *rest]))
    assert message.startswith(" is a bundle of format 2; this version (")
    assert message.endswith(" reads format 1: read it with dalsegno 7.0.0")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (rb'"seq":4', b'"seq":"4"', "cannot be read"),
        (rb'"seq":5,', b'"seq":2,', "does not follow record 4"),
        (rb'"subject":"ds.walk.r1",', b"", "expected a record, with the field 'subject'"),
        (
            rb'"wide":\[0\],"digest":"....',
            b'"wide":[0],"digest":"0000',
            "has a digest that does not match its bytes",
        ),
        (rb'"event":', b'"evnt":', "expected one of event, text and bytes"),
        (rb'"requests":\["r1"\]', b'"requests":7', "the header cannot be read"),
        (rb'"records":\d+', b'"records":1', "the last line counts"),
    ],
)
def test_what_was_altered_and_chained_again_is_still_to_make_sense(
    old: bytes, new: bytes, said: str, tmp_path: Path
) -> None:
    data = written()
    changed = re.sub(old, new, data, count=1)
    assert changed != data
    assert said in refused(tmp_path, rechained(changed.splitlines(keepends=True)))


def test_something_behind_the_last_line_is_found(tmp_path: Path) -> None:
    data = written()
    lines = len(data.splitlines())
    assert refused(tmp_path, data + b"x") == f": expected nothing after line {lines}, its last line"


def test_a_file_that_is_not_there_or_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="No such file"):
        bundle_file.read(str(tmp_path / "none.bundle"))
    with pytest.raises(BundleError, match="directory"):
        bundle_file.read(str(tmp_path))


def test_a_line_without_an_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_file, "MAX_LINE_BYTES", 300)
    assert "longer than any line of a bundle" in refused(tmp_path, written())


def test_a_file_as_large_as_no_bundle_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.bundle"
    path.touch()
    os.truncate(path, bundle_file.MAX_BUNDLE_BYTES + 1)
    with pytest.raises(BundleError, match="it is not a bundle"):
        bundle_file.read(str(path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
)
NAMES = ("seq", "time_ns", "subject", "event", "text", "bytes", "wide", "digest", "left_out", "end")
FIELDS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, JSON))


@given(st.binary(max_size=400))
def test_whatever_is_read_is_a_bundle_or_refused(data: bytes) -> None:
    with pytest.raises(BundleError):
        bundle_file.read_from("x", io.BytesIO(data))


@pytest.mark.slow
@given(st.lists(FIELDS, max_size=4))
def test_whatever_is_chained_is_a_bundle_or_refused(contents: list[dict[str, Any]]) -> None:
    first, *_, last = written().splitlines(keepends=True)
    lines = [
        json.dumps(one)[:-1].encode() + b',"chain":""}\n' if one else b'{"x":1,"chain":""}\n'
        for one in contents
    ]
    with contextlib.suppress(BundleError):
        found = bundle_file.read_from("x", io.BytesIO(rechained([first, *lines, last])))
        assert found.incomplete <= {one.record.subject for one in found.kept}


def test_left_out_data_on_a_subject_that_is_none_of_ours_harms_nobody(tmp_path: Path) -> None:
    data = re.sub(rb'"subject":"ds.output[^"]*"', b'"subject":"x"', written())
    assert read(tmp_path, rechained(data.splitlines(keepends=True))).incomplete == frozenset()


# ---- media -------------------------------------------------------------------------------------------


def with_media(media: dict[str, bytes]) -> bytes:
    header, kept = bundled(answered())
    file = io.BytesIO()
    bundle_file.write(file, header, kept, media)
    return file.getvalue()


def test_media_come_back_as_they_were_whatever_their_size() -> None:
    data = bytes(range(256)) * 10_000  # more than a line holds
    media = {hashlib.sha256(one).hexdigest(): one for one in (data, b"x")}

    assert bundle_file.read_from("x", io.BytesIO(with_media(media))).media == media


def test_a_medium_with_another_digest_is_refused() -> None:
    with pytest.raises(BundleError, match=r"the medium 0+ has a digest that does not match its bytes"):
        bundle_file.read_from("x", io.BytesIO(with_media({"0" * 64: b"x"})))
