"""Folders of pipelines: what is refused, and what each node loads."""

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.base import Item, StatelessResult
from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError
from models.diffusion_pipelines import nodes
from models.diffusion_pipelines.denoiser import Denoiser
from models.diffusion_pipelines.text_encoder import TextEncoder
from models.diffusion_pipelines.vae_decoder import VaeDecoder
from tests.models.diffusion_pipelines.served import NO_PROGRESS, Ask, drive, item_of, loaded, served, started
from tests.tiny.diffusion import tiny_pipeline


def load(folder: Path, node: str, **kwargs: Any) -> Any:
    return nodes.load(folder, node, device="cpu", dtype="auto", progress=NO_PROGRESS, kwargs=kwargs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copied = tmp_path / "checkpoint"
    shutil.copytree(tiny_pipeline("z_image"), copied)
    return copied


def cut(folder: Path) -> None:
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def pickle_only(folder: Path) -> None:
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").rename(
        folder / "transformer" / "diffusion_pytorch_model.bin"
    )


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "model_index.json").unlink(), "model_index.json cannot be read"),
    (lambda folder: (folder / "model_index.json").write_text("{"), "model_index.json cannot be read"),
    (lambda folder: shutil.rmtree(folder / "transformer"), "transformer is missing"),
    (cut, "diffusion_pytorch_model.safetensors is not whole"),
    (pickle_only, "no \\*.safetensors: found diffusion_pytorch_model.bin"),
    (lambda folder: (folder / "transformer" / "config.json").write_text("{"), "checkpoint"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_folder_is_an_error_that_names_the_file(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder, "denoiser")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": ["pipeline", "MyPipeline"]}, "code of their own"),
        ({"_class_name": "NoSuchPipeline"}, "has no pipeline 'NoSuchPipeline'"),
        ({"transformer": ["my_modules.transformer", "Mine"]}, "is not executed"),
        ({"transformer": ["diffusers", "NoSuchModel"]}, "cannot be loaded|not installed"),
    ],
)
def test_classes_that_the_libraries_do_not_have_are_refused(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        load(folder, "denoiser")


def test_a_safety_checker_that_is_not_installed_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_pipeline("cosmos3"), folder)
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"enable_safety_checker": True}))
    with pytest.raises(CheckpointError, match=r"cosmos_guardrail.*safety_checker: false"):
        load(folder, "vae_decoder")
    with torch.inference_mode():
        decoder = load(folder, "vae_decoder", safety_checker=False)
        (result,) = decoder.run([Item(inputs=_latents("cosmos3"), args={})])
    assert result.facts["safety_checker"] == "off"


def _latents(name: str) -> dict[str, torch.Tensor]:
    driven = drive(loaded(name, "denoiser"), [started(name, Ask(call={"num_inference_steps": 1}))])
    return dict(driven.results[0].outputs)


def test_code_in_the_folder_is_refused(folder: Path) -> None:
    (folder / "pipeline.py").write_text("raise SystemExit('executed')")
    with pytest.raises(UnsupportedArchitectureError, match="is not executed"):
        load(folder, "text_encoder")


def test_each_node_holds_its_own_weights_only() -> None:
    denoiser = loaded("z_image", "denoiser").pipeline
    assert denoiser.text_encoder is None
    assert denoiser.vae.decoder is None
    assert denoiser.vae.encoder is None
    assert loaded("ltx_i2v", "denoiser").pipeline.vae.encoder is not None
    decoder = loaded("z_image", "vae_decoder")._pipeline
    assert {parameter.device.type for parameter in decoder.transformer.parameters()} == {"meta"}
    assert decoder.text_encoder is None
    assert loaded("cosmos3", "text_encoder")._pipeline is None


def test_a_dtype_holds_for_text_and_denoiser_while_the_vae_keeps_its_own() -> None:
    folder = tiny_pipeline("flux2_klein")
    node = nodes.load(folder, "denoiser", device="cpu", dtype="bfloat16", progress=NO_PROGRESS, kwargs={})
    assert node.pipeline.transformer.dtype is torch.bfloat16  # type: ignore[union-attr]
    assert node.pipeline.vae.bn.running_mean.dtype is torch.float32  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", ["ltx_i2v", "flux2_klein", "sdxl", "wan21"])
def test_a_pipeline_in_bfloat16_is_near_the_one_in_float32(name: str) -> None:
    folder, ask = tiny_pipeline(name), Ask(call={"num_inference_steps": 2})
    made = []
    with torch.inference_mode():
        for dtype in ("float32", "bfloat16"):
            text, denoiser, decoder = (
                nodes.load(folder, node, device="cpu", dtype=dtype, progress=NO_PROGRESS, kwargs={})
                for node in ("text_encoder", "denoiser", "vae_decoder")
            )
            assert isinstance(text, TextEncoder)
            assert isinstance(denoiser, Denoiser)
            assert isinstance(decoder, VaeDecoder)
            (encoded,) = text.run([item_of(name, ask)])
            assert isinstance(encoded, StatelessResult)
            run = denoiser.start(item_of(name, ask, condition=encoded.outputs["condition"]), {})
            (result,) = decoder.run([Item(inputs=drive(denoiser, [run]).results[0].outputs, args={})])
            assert isinstance(result, StatelessResult)
            made.append(result.outputs["frames"].float())
    assert 0 < float((made[0] - made[1]).abs().mean()) < 4


def test_tiling_and_slicing_reach_the_vae() -> None:
    folder = tiny_pipeline("wan21")
    plain, tiled = load(folder, "vae_decoder"), load(folder, "vae_decoder", vae_tiling=True, vae_slicing=True)
    assert (plain._vae.use_tiling, plain._vae.use_slicing) == (False, False)
    assert (tiled._vae.use_tiling, tiled._vae.use_slicing) == (True, True)


def test_equal_prompts_are_encoded_once() -> None:
    encoder = load(tiny_pipeline("z_image"), "text_encoder")
    with torch.inference_mode():
        encoder.run([item_of("z_image", Ask(seed=seed)) for seed in (1, 2)])
        encoder.run([item_of("z_image", Ask("other words"))])
    assert (encoder.encoder_cache.counters.entries, encoder.encoder_cache.counters.misses) == (2, 2)


def test_a_frozen_prompt_is_not_changed_by_the_runs_that_share_it() -> None:
    with torch.inference_mode():
        started("sd3", Ask()).close()
    (first,), _ = served("sd3", [Ask()])
    (second,), _ = served("sd3", [Ask()])
    assert (first == second).all()


def test_the_library_is_imported_at_first_use() -> None:
    package = Path(nodes.__file__).parent
    for file in package.glob("*.py"):
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in getattr(statement, "names", [])]
            imported = [getattr(statement, "module", None) or "", *names]
            assert not any(name.split(".")[0] in ("diffusers", "peft") for name in imported), file
