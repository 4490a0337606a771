"""The sealer's key is never in the data dir; without a place for it, the log is not sealed, which is said."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from conductor.sealing.assembly import sealer_of
from configs.deployment import ConfigError, DeploymentConfig, SealingSettings
from dalsegno.config import resolve
from shared.log.memory import MemoryLog, MemoryStore
from tests.conductor.script import SUBJECTS


def config(data_dir: Path | None = None, **sealing: Any) -> DeploymentConfig:
    return msgspec.structs.replace(
        resolve.effective("demo", ()).config,
        data_dir=str(data_dir) if data_dir else None,
        sealing=SealingSettings(**sealing),
    )


async def test_no_place_for_the_key_is_said_aloud(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert await sealer_of(config(), MemoryLog(MemoryStore()), SUBJECTS) is None
    assert "THE LOG IS NOT SEALED" in caplog.text


async def test_a_key_in_the_data_dir_is_refused(tmp_path: Path) -> None:
    inside = config(tmp_path, key_file=str(tmp_path / "seal.key"))
    with pytest.raises(ConfigError, match=r"sealing\.key_file: .* is in the data dir"):
        await sealer_of(inside, MemoryLog(MemoryStore()), SUBJECTS)


async def test_sealing_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    assert await sealer_of(config(enabled=False), MemoryLog(MemoryStore()), SUBJECTS) is None
    assert "the log is not sealed" in caplog.text
