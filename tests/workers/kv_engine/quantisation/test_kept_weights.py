"""Quantised weights in files beside a checkpoint: who writes them, who reads them, and what damage does."""

import logging
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from models.checkpoints.files import CheckpointError
from models.grouped_weights import GroupedWeight
from workers.kv_engine.quantisation import kept_weights
from workers.kv_engine.quantisation.kept_weights import KeptWeights, Origin
from workers.kv_engine.text_logits import Comparison

SHAPES = {"layers.0.q": (3, 64), "layers.0.o": (2, 48), "head": (5, 32)}
"""One of them has a last group of half the size."""
ERROR = Comparison(tokens=384, perplexity=12.5, float_perplexity=12.0, agreement=0.9)


def origin_in(folder: Path, **changes: Any) -> Origin:
    config = folder / "config.json"
    if not config.exists():
        config.write_text("{}")
    origin = Origin(
        checkpoint=folder,
        node="llm",
        weights="1234",
        dtype=torch.bfloat16,
        bits=4,
        calibration=(),
        measured=(1, 2, 3),
    )
    return replace(origin, **changes)


def matrices(bits: int = 4) -> dict[str, GroupedWeight]:
    random = torch.Generator().manual_seed(0)
    return {
        name: GroupedWeight(
            bits,
            torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, generator=random),
            torch.rand(outputs, -(-inputs // 32), generator=random),
        )
        for name, (outputs, inputs) in SHAPES.items()
    }


def write(origin: Origin, error: Comparison | None = ERROR) -> dict[str, GroupedWeight]:
    kept, written = KeptWeights(origin, SHAPES), matrices(origin.bits)
    assert not kept.is_whole
    for name, weight in written.items():
        assert kept.get(name) is None
        kept.add(name, weight)
        kept.flush()
    kept.finish(error)
    return written


def assert_has(kept: KeptWeights, expected: dict[str, GroupedWeight]) -> None:
    assert kept.is_whole
    for name, weight in expected.items():
        found = kept.get(name)
        assert found is not None
        assert found.bits == weight.bits
        assert torch.equal(found.numbers, weight.numbers)
        assert torch.equal(found.scales, weight.scales)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_was_written_is_read(bits: int, tmp_path: Path) -> None:
    written = write(origin_in(tmp_path, bits=bits))

    kept = KeptWeights(origin_in(tmp_path, bits=bits), SHAPES)

    assert_has(kept, written)
    assert kept.error == ERROR


def test_an_error_may_not_have_been_measured(tmp_path: Path) -> None:
    write(origin_in(tmp_path), error=None)

    assert KeptWeights(origin_in(tmp_path), SHAPES).error is None


def test_files_have_the_permissions_of_their_folder(tmp_path: Path) -> None:
    write(origin_in(tmp_path))

    folder = origin_in(tmp_path).folder()
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {folder.stat().st_mode & 0o666}


def test_whatever_numbers_follow_from_changes_the_folder(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"weights": "5678"},
        {"dtype": torch.float32},
        {"bits": 8},
        {"node": "other"},
        {"calibration": (1,)},
        {"measured": (1,)},
    ]

    assert len({origin_in(tmp_path, **changed).folder() for changed in changes}) == len(changes)


def test_another_configuration_or_other_files_change_the_folder(tmp_path: Path) -> None:
    origin, weights = origin_in(tmp_path), tmp_path / "model.safetensors"
    folders = {origin.folder()}
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    folders.add(origin.folder())
    for content in (b"weights", b"others!"):
        weights.write_bytes(content)
        os.utime(weights, ns=(0, len(folders)))
        folders.add(origin.folder())

    assert len(folders) == 4


def test_of_two_that_start_together_one_writes(tmp_path: Path) -> None:
    first, second = (KeptWeights(origin_in(tmp_path), SHAPES) for _ in range(2))
    for name, weight in matrices().items():
        first.add(name, weight)
        second.add(name, GroupedWeight(4, torch.zeros_like(weight.numbers), weight.scales))
        first.flush()
        second.flush()
    second.finish(None)
    assert not origin_in(tmp_path).folder().exists()
    first.finish(ERROR)

    assert_has(KeptWeights(origin_in(tmp_path), SHAPES), matrices())


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    folder = origin_in(tmp_path).folder()
    left = folder.with_name(folder.name + ".partial")
    left.mkdir(parents=True)
    (left / "0007.safetensors").write_bytes(b"half a file")

    written = write(origin_in(tmp_path))

    assert_has(KeptWeights(origin_in(tmp_path), SHAPES), written)
    assert not left.exists()


def _truncate(folder: Path) -> None:
    path = folder / "0001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _lose_a_file(folder: Path) -> None:
    (folder / "0001.safetensors").unlink()


def _damage_the_index(folder: Path) -> None:
    (folder / "index.json").write_text('{"matrices": ["hea')


def _name_another(folder: Path) -> None:
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"head"', '"tail"'))


def _no_index(folder: Path) -> None:
    (folder / "index.json").unlink()


@pytest.mark.parametrize("damage", [_truncate, _lose_a_file, _damage_the_index, _name_another, _no_index])
def test_damaged_files_are_written_again(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(origin_in(tmp_path))
    damage(origin_in(tmp_path).folder())

    written = write(origin_in(tmp_path))

    assert "weights are quantised again, because those that were kept cannot be read" in caplog.text
    assert_has(KeptWeights(origin_in(tmp_path), SHAPES), written)


def test_files_that_cannot_be_read_now_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = write(origin_in(tmp_path))

    def denied(path: Path) -> None:
        raise CheckpointError(f"{path} cannot be read") from PermissionError(13, "denied")

    monkeypatch.setattr(kept_weights, "read_shard", denied)
    other = KeptWeights(origin_in(tmp_path), SHAPES)
    assert not other.is_whole
    other.finish(None)
    monkeypatch.undo()

    assert "cannot be read" in caplog.text
    assert_has(KeptWeights(origin_in(tmp_path), SHAPES), written)


def test_an_error_that_is_no_number_is_not_kept(tmp_path: Path) -> None:
    write(origin_in(tmp_path), error=replace(ERROR, perplexity=math.inf))

    kept = KeptWeights(origin_in(tmp_path), SHAPES)
    assert kept.is_whole
    assert kept.error is None


def test_matrices_of_other_shapes_are_written_again(tmp_path: Path) -> None:
    write(origin_in(tmp_path))

    assert not KeptWeights(origin_in(tmp_path), SHAPES | {"head": (6, 32)}).is_whole


class _Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_a_full_disk_keeps_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Disk(1000, 900, 100))

    with caplog.at_level(logging.INFO):
        write(origin_in(tmp_path))

    assert "are not kept for the next start" in caplog.text
    assert not list((tmp_path / ".dalsegno/quantised").iterdir())


def test_a_place_that_cannot_be_written_keeps_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".dalsegno").write_text("a file where the folder would be")

    with caplog.at_level(logging.INFO):
        write(origin_in(tmp_path))

    assert "are not kept for the next start" in caplog.text


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptWeights(origin_in(tmp_path), SHAPES)
    [partial] = (tmp_path / ".dalsegno/quantised").iterdir()
    shutil.rmtree(partial)  # the disk is gone, for example

    with caplog.at_level(logging.INFO):
        for name, weight in matrices().items():
            kept.add(name, weight)
            kept.flush()
        kept.finish(ERROR)

    assert "are not kept for the next start" in caplog.text
    assert not origin_in(tmp_path).folder().exists()
