"""LoRA folders against diffusers' own, per request, among requests without."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import ClientError
from tests.models.diffusion_pipelines.served import Ask, by_diffusers, difference, kind_of, served, started
from tests.models.diffusion_pipelines.served import oracle as oracle_of
from tests.tiny.diffusion import tiny_pipeline

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def write_lora(name: str, folder: Path, parts: dict[str, list[str]]) -> Path:
    """Write a LoRA of random weights for some modules of a tiny pipeline: module -> its layers' names."""
    from peft import LoraConfig, get_peft_model_state_dict  # noqa: PLC0415

    pipeline = kind_of(name).from_pretrained(tiny_pipeline(name))
    layers = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for part, targets in parts.items():
            module = getattr(pipeline, part)
            module.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
            found: dict[str, Any] = get_peft_model_state_dict(module)
            layers[f"{part}_lora_layers"] = {key: 4 * value for key, value in found.items()}
    pipeline.save_lora_weights(folder, **layers)
    return folder


@pytest.fixture
def lora_of(tmp_path: Path) -> Iterator[Any]:
    made = []

    def write(name: str, parts: dict[str, list[str]]) -> Path:
        made.append(name)
        return write_lora(name, tmp_path / name, parts)

    yield write
    for name in made:
        oracle_of(name).unload_lora_weights()


CASES = {
    "z_image": {"transformer": ["to_q", "to_k"]},
    "sdxl": {"unet": ["to_q", "to_k"], "text_encoder": ["q_proj"]},
}


@pytest.mark.parametrize("name", CASES)
def test_a_lora_holds_for_its_own_requests_only(name: str, lora_of: Any) -> None:
    folder = lora_of(name, CASES[name])
    few = {"num_inference_steps": 2}
    asks = [
        Ask("a red cat", 1, few, {"lora": {"path": str(folder), "scale": scale} if scale else None})
        for scale in (1.0, 0.0, 0.5)
    ]
    plain = by_diffusers(name, asks[1])
    frames, driven = served(name, asks)
    oracle_of(name).load_lora_weights(str(folder), adapter_name="own")
    for index, scale in ((0, 1.0), (2, 0.5)):
        oracle_of(name).set_adapters(["own"], [scale])
        assert difference(frames[index], by_diffusers(name, asks[index])) <= 1
        assert difference(frames[index], plain) > 1
    assert difference(frames[0], frames[2]) > 0
    assert difference(frames[1], plain) <= 1
    assert driven.widest == 1


def test_requests_with_one_lora_share_forwards(lora_of: Any) -> None:
    folder = lora_of("z_image", CASES["z_image"])
    lora = {"lora": {"path": str(folder), "scale": 1.0}}
    _, driven = served("z_image", [Ask(seed=seed, further=lora) for seed in (1, 2)])
    assert driven.widest == 2


def test_a_folder_without_weights_is_the_clients_error(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="has 0 files"), torch.inference_mode():
        served("z_image", [Ask(further={"lora": {"path": str(tmp_path), "scale": 1.0}})])


def test_a_lora_of_another_model_is_the_clients_error(tmp_path: Path, lora_of: Any) -> None:
    folder = lora_of("z_image", CASES["z_image"])
    with pytest.raises(ClientError, match="cannot be used with LTXPipeline"), torch.inference_mode():
        served("ltx", [Ask(further={"lora": {"path": str(folder), "scale": 1.0}})])
    started("ltx", Ask()).close()
