"""The embedding settings of checkpoints, in the files that sentence-transformers writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.checkpoints.files import CheckpointError
from models.sequence_request import PoolingParams
from models.text import embedding
from shared.errors import ClientError

ST = "sentence_transformers.models."


def checkpoint(folder: Path, *modules: str, config: dict[str, Any] | None = None, **pooling: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64, **(config or {})}))
    if modules:
        listed = [
            {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"{ST}{kind}"}
            for n, kind in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
    if pooling:
        (folder / "1_Pooling").mkdir()
        said = {"word_embedding_dimension": 64, "include_prompt": True, **pooling}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    return folder


def test_without_settings_the_last_token_is_pooled_and_normalized(tmp_path: Path) -> None:
    assert embedding.read(checkpoint(tmp_path)).pooling(None) == PoolingParams(
        mode="lasttoken", normalize=True
    )


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "lasttoken"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len_tokens"),
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_modules_json_sets_pooling_and_normalization(
    tmp_path: Path, pooling: dict[str, Any], mode: str, *, normalize: bool
) -> None:
    modules = ["Transformer", "Pooling", *["Normalize"] * normalize]

    found = embedding.read(checkpoint(tmp_path, *modules, **pooling))

    assert found.pooling(None) == PoolingParams(mode=mode, normalize=normalize)


@pytest.mark.parametrize(
    ("modules", "pooling", "why"),
    [
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            r"pooled by 'cls\+mean'",
        ),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_cls_token": True}, "'Dense' after the model"),
    ],
)
def test_unsupported_embeddings_are_refused_on_request(
    tmp_path: Path, modules: list[str], pooling: dict[str, Any], why: str
) -> None:
    found = embedding.read(checkpoint(tmp_path, *modules, **pooling))

    with pytest.raises(ClientError, match=why) as refused:
        found.pooling(None)
    assert refused.value.code == "embeddings_not_supported"


@pytest.mark.parametrize(
    ("config", "allowed", "refused"),
    [
        ({}, [64], [1, 32, 65]),
        ({"is_matryoshka": True}, [1, 32, 64], [65]),
        ({"matryoshka_dimensions": [16, 32]}, [16, 32, 64], [8, 65]),
    ],
)
def test_the_config_limits_the_dimensions(
    tmp_path: Path, config: dict[str, Any], allowed: list[int], refused: list[int]
) -> None:
    found = embedding.read(checkpoint(tmp_path, config=config))

    for size in allowed:
        assert (found.pooling(size).dimensions or 64) == size
    for size in refused:
        with pytest.raises(ClientError, match=f"found {size}") as wrong:
            found.pooling(size)
        assert wrong.value.code == "dimensions_not_supported"


@pytest.mark.parametrize("damaged", ["{", "[1]", '[{"path": 1}]'])
def test_a_damaged_list_of_modules_is_reported(tmp_path: Path, damaged: str) -> None:
    (checkpoint(tmp_path) / "modules.json").write_text(damaged)

    with pytest.raises(CheckpointError, match=r"modules\.json"):
        embedding.read(tmp_path)


def test_a_pooling_without_a_mode_is_reported(tmp_path: Path) -> None:
    checkpoint(tmp_path, "Transformer", "Pooling", include_prompt=True, pooling_mode_mean_tokens=False)

    with pytest.raises(CheckpointError, match="expected one of"):
        embedding.read(tmp_path)
