import json
from pathlib import Path

import pytest

from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import INDEX, read_shard, read_shards, weights_digest
from tests.tiny import tiny_checkpoint, write_checkpoint


def test_a_single_file_is_read_whole() -> None:
    (shard,) = read_shards(tiny_checkpoint("qwen3"))

    assert shard.tensors["model.norm.weight"].shape == (64,)
    assert shard.tensors["model.norm.weight"].dtype == "F32"
    assert shard.nbytes == shard.path.stat().st_size


def test_shards_hold_the_same_tensors_as_one_file() -> None:
    def tensors(checkpoint: Path) -> dict[str, tuple[int, ...]]:
        return {n: t.shape for shard in read_shards(checkpoint) for n, t in shard.tensors.items()}

    assert tensors(tiny_checkpoint("qwen3", shards=3)) == tensors(tiny_checkpoint("qwen3"))


@pytest.mark.parametrize("keep", [0, 5, 100, 3000, -1])
def test_a_file_cut_short_is_named_with_both_sizes(tmp_path: Path, keep: int) -> None:
    path = write_checkpoint(tmp_path, shards=2) / "model-00002-of-00002.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])

    with pytest.raises(CheckpointError, match="model-00002-of-00002") as caught:
        read_shards(tmp_path)

    if keep not in (0, 5):  # the header's own length is gone there
        assert f"found {len(whole[:keep])}" in caught.value.message
        assert "expected" in caught.value.message


def test_the_expected_size_is_the_whole_files(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.truncate(size - 7)

    with pytest.raises(CheckpointError, match=f"expected {size} bytes, found {size - 7}"):
        read_shards(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, shards=3) / "model-00003-of-00003.safetensors").unlink()

    with pytest.raises(
        CheckpointError, match=r"model-00003-of-00003\.safetensors cannot be read: No such file"
    ):
        read_shards(tmp_path)


def test_an_index_of_another_checkpoint_is_noticed(tmp_path: Path) -> None:
    index = write_checkpoint(tmp_path, shards=2) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))

    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.layers\.9"):
        read_shards(tmp_path)


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')

    with pytest.raises(CheckpointError, match="expected a file in the same folder"):
        read_shards(tmp_path)


@pytest.mark.parametrize("content", [b"not json", b"[]", b'{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        read_shards(tmp_path)


def test_an_index_that_names_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="its weight_map is empty; download it again"):
        read_shards(tmp_path)


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")

    with pytest.raises(CheckpointError, match=r"expected model\.safetensors .* found pytorch_model\.bin"):
        read_shards(tmp_path)


def test_an_empty_folder_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no weights"):
        read_shards(tmp_path)


@pytest.mark.parametrize(
    "content", [b"\xff" * 64, b"\x02" + bytes(7) + b"[]", b"\x08" + bytes(7) + b'{"a": 1}']
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"model\.safetensors is"):
        read_shard(path)


def test_the_digest_tells_checkpoints_apart_and_copies_alike(tmp_path: Path) -> None:
    def digest(checkpoint: Path) -> str:
        return weights_digest(read_shards(checkpoint))

    first = tiny_checkpoint("qwen3")
    assert digest(write_checkpoint(tmp_path)) == digest(first)
    assert (
        len({digest(first), digest(tiny_checkpoint("qwen3", seed=1)), digest(tiny_checkpoint("llama"))}) == 3
    )
