"""Damaged files of a deployment: a typed error that names the file, or a model that can still be served."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import given

from configs import checks
from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import read_shard
from shared.errors import ClientError
from tests.fuzz.damage import FUZZED, damaged_bytes, damaged_value
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.slow


_CONFIG: Final[dict[str, Any]] = {
    "model": "decoder_lm",
    "checkpoint": ".",
    "max_seq_len": 64,
    "node_groups": [{"node_names": ["prepare", "llm"], "ranks": [0], "tp_size": 1}],
    "model_kwargs": {"dtype": "float32"},
    "gateway": {"port": 8000, "cors_origins": ["*"]},
    "logs": {"format": "json"},
}
_HEADER: Final = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a configuration may name as its checkpoint."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "config.json").write_text("{}")
    return folder


@given(raw=damaged_value(_CONFIG))
@FUZZED
def test_a_damaged_configuration_is_a_config_error(folder: Path, raw: Any) -> None:
    path = folder / "damaged.yaml"
    path.write_text(yaml.safe_dump(raw, allow_unicode=False), encoding="utf-8")

    said = refusal(lambda: checks.resolve(str(path)), ClientError)

    assert said is None or str(path) in said or "model" in said


@given(text=damaged_bytes(yaml.safe_dump(_CONFIG).encode()))
@FUZZED
def test_damaged_yaml_is_a_config_error(folder: Path, text: bytes) -> None:
    path = folder / "damaged.yaml"
    path.write_bytes(text)

    said = refusal(lambda: checks.resolve(str(path)), ClientError)

    assert said is None or str(path) in said or "model" in said


def refusal(read: Callable[[], object], kind: type[ClientError]) -> str | None:
    """The refusal of `read`; None if it accepts the input. Any other error passes through."""
    try:
        read()
    except kind as error:
        return error.message
    return None


def safetensors(header: bytes, body: bytes = bytes(32)) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


@given(header=damaged_value(_HEADER))
@FUZZED
def test_a_damaged_header_of_weights_is_a_checkpoint_error(folder: Path, header: Any) -> None:
    path = folder / "damaged.safetensors"
    path.write_bytes(safetensors(json.dumps(header).encode()))

    said = refusal(lambda: read_shard(path), CheckpointError)

    if said is not None:
        assert str(path) in said
    else:
        assert sum(tensor.nbytes for tensor in read_shard(path).tensors.values()) <= 32


@given(data=damaged_bytes(safetensors(json.dumps(_HEADER).encode())))
@FUZZED
def test_damaged_weights_are_a_checkpoint_error(folder: Path, data: bytes) -> None:
    path = folder / "damaged.safetensors"
    path.write_bytes(data)

    said = refusal(lambda: read_shard(path), CheckpointError)

    assert said is None or str(path) in said


@given(raw=damaged_value(json.loads((tiny_checkpoint() / "config.json").read_text())))
@FUZZED
def test_a_damaged_config_json_is_a_typed_error(folder: Path, raw: Any) -> None:
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / "config.json").write_text(json.dumps(raw))

    said = refusal(lambda: checks.resolve(str(folder / "other")), ClientError)

    assert said is None or "other" in said
