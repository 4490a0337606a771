"""The nodes of BAGEL as the engines see them, and folders that cannot be served."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from models.bagel import vae
from models.bagel.llm import BagelLM
from models.bagel.mot import Routing
from models.bagel.nodes import examine, load
from models.bagel.spans import Kind, Span, parts_of
from models.bagel.weight_files import weight_files
from models.base import Item, StatelessResult
from models.checkpoints.files import CheckpointError
from models.registry import family_of
from shared.errors import ClientError
from tests.tiny import tiny_checkpoint
from tests.tiny.bagel import bagel_checkpoint

SPANS = [Span(Kind.TEXT, 2), Span(Kind.VAE, 6, "a"), Span(Kind.VIT, 4, "b"), Span(Kind.TEXT, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(bagel_checkpoint(), tmp_path / "bagel"))


def llm() -> BagelLM:
    found = load(bagel_checkpoint(), "LLM_cfg_text")
    assert isinstance(found, BagelLM)
    return found


# ---- the language model ----------------------------------------------------------------------------


def test_an_image_has_one_position_and_latents_the_other_route() -> None:
    node, parts = llm(), parts_of(SPANS, seed=1)
    ids = [5] * sum(span.tokens for span in SPANS)
    positions, following = node.positions(ids, parts)
    assert positions.tolist() == [[0, 1, *([2] * 6), *([3] * 4), 4, 5, 6]]
    assert following == 7
    assert node.routes(ids, parts).tolist() == [0, 0, 0, 1, 1, 1, 1, 0, *([0] * 7)]
    assert node.positions([], [])[1] == 0


def test_the_node_has_the_name_that_it_was_loaded_under() -> None:
    node = llm()
    assert node.name == "LLM_cfg_text"
    assert (node.layout.layers, node.layout.kv_heads, node.layout.head_dim) == (2, 2, 16)
    assert (node.vocab_size, node.max_positions, node.latent_channels) == (512, 32768, 64)
    assert sorted(node.programs) == ["branch", "flow"]


def test_tokens_of_mixed_routes_are_computed_as_each_for_itself() -> None:
    """Each token sees itself alone, so that a token's route is all that matters."""
    node = llm()
    embeds = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(3))
    mask = torch.full((7, 7), float("-inf")).fill_diagonal_(0)[None, None]

    def hidden(routes: list[int]) -> torch.Tensor:
        found = node.text_model(inputs_embeds=embeds, attention_mask=mask, routes=torch.tensor(routes).char())
        states: torch.Tensor = found.last_hidden_state[0]
        return states

    mixed, text, latents = hidden([0, 1, 1, 0, 1, 0, 0]), hidden([0] * 7), hidden([1] * 7)
    of_latents = torch.tensor([1, 2, 4])
    of_text = torch.tensor([0, 3, 5, 6])
    torch.testing.assert_close(mixed[of_latents], latents[of_latents])
    torch.testing.assert_close(mixed[of_text], text[of_text])
    assert float((text - latents).abs().min(dim=-1).values.max()) > 0.01


def test_a_batch_of_text_is_not_sorted() -> None:
    assert Routing.of(None) is None
    assert Routing.of(torch.zeros(4, dtype=torch.int8)) is None


def test_a_larger_image_than_the_model_has_positions_for_is_refused() -> None:
    with pytest.raises(ClientError, match=r"at most 64 x 64 tokens, found 65 x 1"):
        llm().latent_embeds(torch.zeros(65, 64), 1.0, (65, 1))


def test_the_time_of_a_flow_matters() -> None:
    node, latents = llm(), torch.zeros(4, 64)
    early, late = (node.latent_embeds(latents, time, (2, 2)) for time in (1.0, 0.1))
    assert early.shape == (6, 64)
    assert torch.equal(early[0], late[0]), "a bracket is a token of text"
    assert float((early[1:-1] - late[1:-1]).abs().max()) > 0.1


# ---- encoders and the decoder ----------------------------------------------------------------------


def test_latents_and_tokens_are_one_another() -> None:
    latents = torch.randn(16, 6, 4)
    tokens = vae.to_tokens(latents)
    assert tokens.shape == (6, 64)
    assert torch.equal(vae.to_latents(tokens, 3, 2), latents)


def test_latents_of_an_image_are_drawn_by_the_seed() -> None:
    node: Any = load(bagel_checkpoint(), "vae_encoder")
    visual = {"digest": "a", "shape": [3, 32, 48], "rows": 8}
    pixels = torch.rand(3 * 32 * 48) * 2 - 1

    def rows(seed: int) -> torch.Tensor:
        item = Item(inputs={"vae_pixels": pixels}, args={"vae_visuals": [visual]}, seed=seed)
        [result] = node.run([item])
        assert isinstance(result, StatelessResult)
        found: torch.Tensor = result.outputs["latent_rows"]
        return found

    first = rows(1)
    assert first.shape == (8, 64)
    assert torch.equal(rows(1), first)
    assert not torch.equal(rows(2), first)
    assert node.encoder_cache.counters.hits == 2, "the distribution is computed once"


def test_rows_of_both_encoders_are_merged_in_the_order_of_the_prompt() -> None:
    node: Any = load(bagel_checkpoint(), "vit_encoder")
    visuals = [{"digest": name, "shape": [3, 14, 28], "rows": 4} for name in "ab"]
    latents = [{"digest": name, "shape": [3, 16, 16], "rows": 3} for name in "ab"]
    inputs = {"pixels": torch.rand(2 * 3 * 14 * 28), "latent_rows": torch.rand(6, 64)}

    def rows(**args: Any) -> torch.Tensor:
        [result] = node.run([Item(inputs=inputs, args={"visuals": visuals, **args}, seed=0)])
        found: torch.Tensor = result.outputs["embeds"]
        return found

    images = rows()
    merged = rows(vae_visuals=latents, order=["vae", "vit", "vae", "vit"])
    drawn = inputs["latent_rows"]
    assert torch.equal(merged, torch.cat([drawn[:3], images[:4], drawn[3:], images[4:]]))
    assert not torch.equal(images[:4], images[4:])


def test_a_prompt_without_images_has_no_rows() -> None:
    for name, argument, given, edge in (
        ("vit_encoder", "visuals", "pixels", "embeds"),
        ("vae_encoder", "vae_visuals", "vae_pixels", "latent_rows"),
    ):
        node: Any = load(bagel_checkpoint(), name)
        [result] = node.run([Item(inputs={given: torch.zeros(0)}, args={argument: [], "order": []}, seed=0)])
        assert result.outputs[edge].shape == (0, 64)


def test_a_larger_image_than_the_tower_has_positions_for_is_refused() -> None:
    node: Any = load(bagel_checkpoint(), "vit_encoder")
    visual = {"digest": "wide", "shape": [3, 14, 71 * 14], "rows": 73}
    with pytest.raises(ClientError, match=r"at most 70 x 70 patches, found 1 x 71"):
        node.run([Item(inputs={"pixels": torch.rand(3 * 14 * 71 * 14)}, args={"visuals": [visual]}, seed=0)])


# ---- folders ---------------------------------------------------------------------------------------


def test_a_folder_in_the_published_layout_is_claimed(folder: Path) -> None:
    assert family_of(folder) == "bagel"
    (folder / "config.json").unlink()
    assert family_of(folder) == "bagel", "some copies have only the configs of the parts"
    assert family_of(tiny_checkpoint("qwen2")) == "decoder_lm"
    assert examine(folder, "LLM") == 32768


def test_a_folder_without_weights_can_be_planned_with(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert examine(folder, "LLM") == 32768


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _without(path: Path, name: str) -> None:
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


def _resized(path: Path, name: str, *shape: int) -> None:
    tensors = load_file(path)
    save_file(tensors | {name: np.zeros(shape, np.float32)}, path)


def _set(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("node", "damage", "words"),
    [
        ("LLM", lambda at: (at / "llm_config.json").unlink(), r"llm_config\.json cannot be read"),
        ("vit_encoder", lambda at: (at / "vit_config.json").unlink(), r"vit_config\.json cannot be read"),
        ("LLM", lambda at: (at / "ema.safetensors").unlink(), r"ema\.safetensors cannot be read"),
        ("LLM", lambda at: _truncate(at / "ema.safetensors"), r"ema\.safetensors is not whole: expected \d+"),
        ("vae_decoder", lambda at: _truncate(at / "ae.safetensors"), r"ae\.safetensors is not whole"),
        (
            "LLM",
            lambda at: _without(
                at / "ema.safetensors", "language_model.model.layers.1.mlp_moe_gen.up_proj.weight"
            ),
            r"lack .*1 tensors, language_model\.model\.layers\.1\.mlp_moe_gen\.up_proj\.weight",
        ),
        (
            "LLM",
            lambda at: _without(at / "ema.safetensors", "vae2llm.weight"),
            r"the matrix vae2llm\.weight, found no",
        ),
        (
            "vit_encoder",
            lambda at: _without(at / "ema.safetensors", "connector.fc1.bias"),
            r"lack .*connector\.fc1\.bias",
        ),
        ("LLM", lambda at: _set(at / "llm_config.json", hidden_size=32), r"have another shape"),
        ("LLM", lambda at: _set(at / "llm_config.json", num_hidden_layers=1), r"hold what has no place in"),
        (
            "vit_encoder",
            lambda at: _set(at / "vit_config.json", num_hidden_layers=1),
            r"at least 2, .*found 1",
        ),
        (
            "vae_decoder",
            lambda at: shutil.copy(at / "ema.safetensors", at / "ae.safetensors"),
            r"expected the autoencoder of FLUX, .*found no such tensor",
        ),
        (
            "vae_decoder",
            lambda at: _without(at / "ae.safetensors", "decoder.mid.attn_1.q.weight"),
            r"do not fit the decoder of an autoencoder of FLUX",
        ),
        (
            "vae_encoder",
            lambda at: _resized(at / "ae.safetensors", "decoder.conv_in.weight", 32, 4, 3, 3),
            r"expected 16 channels of latents.*found an autoencoder of 4",
        ),
        (
            "LLM",
            lambda at: _resized(at / "ema.safetensors", "latent_pos_embed.pos_embed", 10, 64),
            r"a square number of rows in latent_pos_embed\.pos_embed, found 10",
        ),
        (
            "LLM",
            lambda at: (at / "tokenizer.json").write_text(
                (at / "tokenizer.json").read_text().replace("<|vision_start|>", "<|elsewhere|>")
            ),
            r"lacks the token '<\|vision_start\|>'",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(
    folder: Path, node: str, damage: Callable[[Path], object], words: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        load(folder, node)


@pytest.mark.parametrize("file", ["ema.safetensors", "ae.safetensors"])
def test_a_damaged_weight_file_is_found_before_anything_is_loaded(folder: Path, file: str) -> None:
    _truncate(folder / file)
    with pytest.raises(CheckpointError, match=r"is not whole"):
        examine(folder, "LLM")


def test_each_node_names_the_files_that_it_loads(folder: Path) -> None:
    nodes = ("LLM", "LLM_cfg_text", "combine_cfg", "vit_encoder", "vae_encoder", "vae_decoder")
    assert {node: sorted(weight_files(folder, node, {})) for node in nodes} == {
        "LLM": ["ae.safetensors", "ema.safetensors"],
        "LLM_cfg_text": ["ema.safetensors"],
        "combine_cfg": ["ae.safetensors"],
        "vit_encoder": ["ema.safetensors"],
        "vae_encoder": ["ae.safetensors", "ema.safetensors"],
        "vae_decoder": ["ae.safetensors"],
    }
