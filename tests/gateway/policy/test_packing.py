"""Observations as openpi's clients pack them, and the file of arrays that they become."""

import msgpack
import numpy as np
import pytest
from safetensors.numpy import load

from gateway.policy import packing
from gateway.policy.packing import Array, ObservationError
from tests.gateway.policy.openpi_client import pack, unpacked

OBSERVATION = {
    "observation/image": np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
    "nested": {"deep": {"state": np.linspace(0, 1, 3)}, "flag": np.bool_(True)},
    "gripper": np.float32(0.25),
    "plain": 2,
    "numbers": [1, 2.5],
    "prompt": "pick up the cup",
    "session": "a text that no layout has",
    "nothing": None,
}


def test_an_observation_becomes_a_text_and_a_file_of_arrays() -> None:
    seen = packing.unpack(pack(OBSERVATION))
    assert seen.prompt == "pick up the cup"
    found = load(packing.file_of(seen.arrays))
    assert sorted(found) == sorted(
        ["observation/image", "nested/deep/state", "nested/flag", "gripper", "plain", "numbers"]
    )
    np.testing.assert_array_equal(found["observation/image"], OBSERVATION["observation/image"])
    np.testing.assert_array_equal(found["nested/deep/state"], np.linspace(0, 1, 3))
    assert [found[name].tolist() for name in ("nested/flag", "gripper", "plain", "numbers")] == [
        1.0, 0.25, 2.0, [1.0, 2.5],
    ]  # fmt: skip


def test_an_instruction_may_be_an_array_of_one_text() -> None:
    assert packing.unpack(pack({"prompt": np.asarray("fold é")})).prompt == "fold é"
    assert packing.unpack(pack({"task": b"fold"})).prompt == "fold"


@pytest.mark.parametrize("dtype", ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"])
def test_all_plain_types_are_read(dtype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    found = load(packing.file_of(packing.unpack(pack({"a": array})).arrays))["a"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_an_answer_is_read_by_openpi() -> None:
    actions = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
    answer = packing.pack(
        {"actions": Array("<f4", (3, 2), actions.tobytes()), "server_timing": {"infer_ms": 1.5}}
    )
    found = msgpack.unpackb(answer, object_hook=unpacked)
    np.testing.assert_array_equal(found["actions"], actions)
    assert found["server_timing"] == {"infer_ms": 1.5}


ARRAY = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (b"", "expected a msgpack map"),
        (b"\xc1", "expected a msgpack map"),
        (b"\x81" * 100_000, "expected a msgpack map"),
        (b"\xdd\xff\xff\xff\xff", "expected a msgpack map"),
        (msgpack.packb([1]), "expected a msgpack map, found list"),
        (msgpack.packb({"prompt": b"\xff"}), "prompt: expected UTF-8"),
        (msgpack.packb({"prompt": 7}), "prompt: expected a text, found int"),
        (msgpack.packb({"a": ARRAY | {b"dtype": "|O"}}), "a: expected one of .* as dtype"),
        (msgpack.packb({"a": ARRAY | {b"dtype": ">f4"}}), "a: expected one of"),
        (msgpack.packb({"a": ARRAY | {b"shape": [3]}}), "a: expected the bytes of <f4"),
        (msgpack.packb({"a": ARRAY | {b"shape": [-2, -1]}}), "a: expected the bytes of <f4"),
        (
            msgpack.packb({"a": ARRAY | {b"shape": [1 << 40, 0], b"data": b""}, "b": [["x"]]}),
            "b: expected numbers",
        ),
        (msgpack.packb({"a": {b"__ndarray__": 7}}), "a: expected an array"),
        (msgpack.packb({"x" * 300: 1}), "expected names of up to 256"),
        (msgpack.packb({"__metadata__": 1}), "expected names"),
        (msgpack.packb({f"n{n}": 1 for n in range(300)}), "at most 256 arrays"),
    ],
)
def test_what_is_no_observation_is_refused(message: bytes, complaint: str) -> None:
    with pytest.raises(ObservationError, match=complaint):
        packing.unpack(message)
