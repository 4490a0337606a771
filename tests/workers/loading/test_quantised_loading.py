"""`quantize` and `calibration_text`: what is computed with, what is measured, and what is refused."""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from configs.checks import resolve
from configs.deployment import ConfigError, NodeGroup
from dalsegno.check import command as check_command
from models.checkpoints.files import UnsupportedArchitectureError
from tests.tiny import tiny_checkpoint
from workers import settings
from workers.cpu_kernels import library
from workers.cpu_kernels.decoder import NativeDecoder
from workers.cpu_kernels.packing import MatrixPacker
from workers.kv_engine.gpu import fusion
from workers.kv_engine.node import kv_dtype_of
from workers.kv_engine.quantisation.wanted import Quantisation
from workers.kv_engine.text_logits import Predictions, logits_of
from workers.loading.device_share import DeviceShare
from workers.loading.engines import make_kv_engines
from workers.loading.node_loading import can_leave_weights, with_kernels


def node(model: str = "demo", **kwargs: Any) -> Any:
    config = resolve(model)
    told = settings.parse({"keep_quantised": False} | kwargs)
    engines = make_kv_engines(config, told, 0, lambda *_: None)
    return engines["llm"].node


needs_kernels = pytest.mark.skipif(library.load() is None, reason="there are no CPU kernels on this machine")


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoint_is_quantised_while_it_is_loaded(bits: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = node(quantize=f"int{bits}")

    assert isinstance(found, NativeDecoder)
    assert found.rounds_inputs
    assert f"weights of int{bits}: perplexity" in caplog.text


def copied_demo(tmp_path: Path) -> str:
    """A checkpoint of its own, beside which nothing is kept yet."""
    folder = tmp_path / "demo"
    shutil.copytree(resolve("demo").checkpoint, folder, ignore=shutil.ignore_patterns(".dalsegno"))
    return str(folder)


def errors_in(text: str) -> list[str]:
    return re.findall(r"weights of int4: (perplexity .*)", text)


@needs_kernels
def test_the_next_start_reads_what_was_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, text = copied_demo(tmp_path), list(range(40))
    with caplog.at_level(logging.INFO):
        first = logits_of(node(checkpoint, quantize="int4", keep_quantised=True), text)

        def quantised(*_: object) -> None:
            pytest.fail("a matrix is quantised again")

        monkeypatch.setattr(MatrixPacker, "quantised", quantised)
        monkeypatch.setattr(Predictions, "of", quantised)
        found = node(checkpoint, quantize="int4", keep_quantised=True)

    monkeypatch.undo()
    assert torch.equal(logits_of(found, text), first)
    before, after = errors_in(caplog.text)
    assert before == after


@needs_kernels
def test_a_link_to_nowhere_keeps_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = copied_demo(tmp_path)
    (Path(checkpoint) / "other.safetensors").symlink_to(tmp_path / "nowhere")

    assert node(checkpoint, quantize="int4", keep_quantised=True).rounds_inputs
    assert "quantised weights are neither read nor kept" in caplog.text


@needs_kernels
def test_weights_are_not_kept_if_the_settings_say_so(tmp_path: Path) -> None:
    checkpoint = copied_demo(tmp_path)

    node(checkpoint, quantize="int4", keep_quantised=False)

    assert not (Path(checkpoint) / ".dalsegno").exists()


@needs_kernels
def test_by_default_floats_stay_floats() -> None:
    assert not node().rounds_inputs


@needs_kernels
def test_a_calibration_text_decides_between_errors(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def len(a): return the number of items of a container. " * 20)

    plain, calibrated = (node(quantize="int4", **more) for more in ({}, {"calibration_text": str(text)}))

    hidden = torch.randn(1, plain._hidden, generator=torch.Generator().manual_seed(0))
    rows = torch.zeros(1, dtype=torch.int64)
    assert not torch.equal(plain.head(hidden, rows), calibrated.head(hidden, rows))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\xff"])
def test_a_text_that_cannot_calibrate_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text.txt").write_bytes(content)

    with pytest.raises(ConfigError, match=r"calibration_text: .*text\.txt"):
        node(quantize="int4", calibration_text=str(tmp_path / "text.txt"))


@needs_kernels
def test_keys_and_values_of_eight_bits_are_half_as_large(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engines = [
            make_kv_engines(resolve("demo"), settings.parse(kwargs), 0, lambda *_: None)["llm"]
            for kwargs in ({"kv_cache": "int8", "dtype": "bfloat16"}, {"dtype": "bfloat16"})
        ]

    rounded, plain = (engine.node.layout.numbers * kv_dtype_of(engine.node).itemsize for engine in engines)
    assert rounded / plain == pytest.approx((1 + 4 / engines[1].node.layout.head_dim) / 2)
    assert caplog.text.count("keys and values of int8: perplexity") == 1
    told = msgspec.structs.replace(resolve("demo"), model_kwargs={"kv_cache": "int8"})
    assert check_command._kv_bytes(told) == rounded


ON_GPU = DeviceShare(device=torch.device("cuda"), other_ranks=(), kv_pools=1)
ON_CPU = DeviceShare(device=torch.device("cpu"), other_ranks=(), kv_pools=1)


def test_on_a_gpu_keys_and_values_are_floats() -> None:
    wanted = settings.parse({"kv_cache": "int8"})

    with pytest.raises(ConfigError, match="kv_cache is int8, but the model is on a GPU"):
        with_kernels(object(), wanted, ON_GPU)  # type: ignore[arg-type] # not reached


def test_on_a_cpu_no_weights_become_floats_of_eight_bits() -> None:
    with pytest.raises(ConfigError, match=r"quantize is fp8, .* on a CPU: expected int8 or int4"):
        with_kernels(object(), settings.parse({"quantize": "fp8"}), ON_CPU)  # type: ignore[arg-type] # likewise


@pytest.mark.parametrize(
    ("quantize", "bits", "is_float"), [("fp8", 8, True), ("int8", 8, False), ("int4", 4, False)]
)
def test_on_a_gpu_the_kernels_get_what_is_wanted(
    quantize: str, bits: int, is_float: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[Quantisation] = []

    def use(node: Any, quantisation: Quantisation) -> Any:
        got.append(quantisation)
        return node

    monkeypatch.setattr(fusion, "use_gpu_kernels", use)
    config, found = resolve("demo"), object()

    served = with_kernels(
        found,  # type: ignore[arg-type] # nothing else is done with it
        settings.parse({"quantize": quantize}),
        ON_GPU,
        quantised_from=config,
    )

    assert served is found
    [wanted] = got
    assert (wanted.bits, wanted.is_float) == (bits, is_float)
    assert wanted.measured
    # There is nothing to choose in floats of eight bits that the next start could save.
    assert wanted.kept_beside == (None if is_float else Path(config.checkpoint))


@pytest.mark.parametrize(
    ("kwargs", "can"), [({}, False), ({"quantize": "int4"}, True), ({"kernels": "torch"}, False)]
)
def test_on_a_gpu_floats_are_left_in_the_files_only_to_be_quantised(
    kwargs: dict[str, Any], can: bool
) -> None:
    assert can_leave_weights(resolve("demo"), settings.parse(kwargs), ON_GPU.device) is can
    assert can_leave_weights(resolve("demo"), settings.parse(kwargs), ON_CPU.device)


@pytest.mark.parametrize(("quantize", "can"), [("auto", True), ("none", False), ("int4", True)])
def test_on_a_gpu_numbers_of_few_bits_are_left_in_the_files(tmp_path: Path, quantize: str, can: bool) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    config = msgspec.structs.replace(resolve("demo"), checkpoint=str(tmp_path))

    assert can_leave_weights(config, settings.parse({"quantize": quantize}), ON_GPU.device) is can
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    assert can_leave_weights(config, settings.parse({"quantize": quantize}), ON_GPU.device) is (
        quantize == "int4"
    )


@pytest.mark.parametrize(
    ("model", "told", "reason"),
    [
        ("demo-draw", {}, "has no node with layers of a language model"),
        ("demo", {"adapters_at_runtime": True}, "takes adapters, which torch computes"),
        (
            "demo",
            {"node_groups": [NodeGroup(node_names=["prepare", "llm"], ranks=[0, 1], tp_size=2)]},
            "is shared by ranks",
        ),
    ],
)
def test_models_whose_weights_cannot_be_quantised_are_refused_before_anything_is_loaded(
    model: str, told: dict[str, Any], reason: str
) -> None:
    config = resolve(model)
    config = msgspec.structs.replace(config, model_kwargs=config.model_kwargs | {"quantize": "int4"}, **told)

    with pytest.raises(ConfigError, match=f"quantize is int4, but the model {reason}"):
        settings.of(config)


def test_what_the_kernels_do_not_compute_is_refused() -> None:
    for kwargs, what in (
        ({"quantize": "int4"}, "quantize is int4"),
        ({"kv_cache": "int8"}, "kv_cache is int8"),
    ):
        with pytest.raises(
            UnsupportedArchitectureError, match=f"{what}, but the CPU kernels do not support heads of 16"
        ):
            node(str(tiny_checkpoint("gemma3")), **kwargs)
