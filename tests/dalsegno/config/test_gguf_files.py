"""The folder of a GGUF file: made once for each state of the file, and what is told when it cannot be."""

import os
from pathlib import Path

import pytest

from configs import files
from configs.deployment import ConfigError
from dalsegno.config import gguf_files
from models.checkpoints.files import CheckpointError
from tests.models.gguf.written import write_gguf
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.processes


def test_a_file_is_converted_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    said: list[str] = []
    file = write_gguf(tiny_checkpoint("qwen3"), tmp_path / "Tiny-Q8_0.gguf")

    first = gguf_files.converted(file, tmp_path / "cache", said.append)
    again = gguf_files.converted(file, tmp_path / "cache", said.append)
    os.utime(file, ns=(0, 0))
    changed = gguf_files.converted(file, tmp_path / "cache", said.append)

    assert first == again != changed
    assert [folder.name for folder in (first, changed)] == ["Tiny-Q8_0"] * 2
    assert len(said) == 2
    assert said[0].startswith("Tiny-Q8_0.gguf (0.0 GiB) is converted once, in ")
    base = files.read(
        str(file), convert=lambda one: gguf_files.converted(one, tmp_path / "cache", said.append)
    )
    assert (base.name, base.values["model"], base.values["checkpoint"]) == (
        "Tiny-Q8_0", "decoder_lm", str(changed),
    )  # fmt: skip


@pytest.mark.parametrize("size", [None, 20_000])
def test_a_damaged_folder_is_made_anew(tmp_path: Path, size: int | None) -> None:
    file, said = write_gguf(tiny_checkpoint("qwen3"), tmp_path / "m.gguf"), list[str]()
    folder = gguf_files.converted(file, tmp_path / "cache", said.append)
    weights = folder / "model-00001.safetensors"
    whole = weights.stat().st_size
    if size is None:
        weights.unlink()
    else:
        os.truncate(weights, size)

    assert gguf_files.converted(file, tmp_path / "cache", said.append) == folder

    assert weights.stat().st_size == whole
    assert len(said) == 2


def test_what_is_wrong_with_a_file_is_the_error(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")

    with pytest.raises(ConfigError, match=r"m\.gguf is no whole GGUF file: .*; download it again"):
        gguf_files.converted(file, tmp_path / "cache", lambda _: None)
    with pytest.raises(ConfigError, match=r"m\.gguf' is no model to serve: expected .* a GGUF file"):
        files.read(str(tmp_path / "other" / "m.gguf"), convert=lambda one: one)


def test_a_missing_part_is_told_without_a_conversion(tmp_path: Path) -> None:
    file = tmp_path / "m-00001-of-00002.gguf"
    file.touch()

    with pytest.raises(CheckpointError, match=r"lacks m-00002-of-00002\.gguf"):
        gguf_files.converted(file, tmp_path / "cache", lambda _: None)
