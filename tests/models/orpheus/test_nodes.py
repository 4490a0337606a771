"""The torch nodes against the published packages: tokens by transformers, sound by `snac`."""

import json
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.base import ChunkOf, Item, KVLayout, StatelessResult
from models.checkpoints import companions
from models.checkpoints.files import CheckpointError
from models.orpheus.frames import FIRST_AUDIO
from models.orpheus.nodes import SnacDecoder, load
from models.orpheus.snac import load_snac
from models.orpheus.weight_files import find_snac
from models.transformers_lm.node import DecoderLM
from shared.errors import BugError
from tests.models.orpheus.oracle import firings, sound_of
from tests.tiny.orpheus import copied, tiny_orpheus, write_snac

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder() -> SnacDecoder:
    node = load(tiny_orpheus(), "snac_decoder")
    assert isinstance(node, SnacDecoder)
    return node


def audio_tokens(tokens: int, seed: int = 0) -> torch.Tensor:
    """Audio tokens as the model generates them: each place in a frame has 4096 tokens."""
    codes = torch.randint(0, 4096, (tokens,), generator=torch.Generator().manual_seed(seed))
    return (FIRST_AUDIO + torch.arange(tokens) % 7 * 4096 + codes).to(torch.int32)


def sounds(node: SnacDecoder, items: list[Item]) -> list[torch.Tensor]:
    found = node.run(items)
    assert all(isinstance(result, StatelessResult) for result in found), found
    return [result.outputs["audio"] for result in found if isinstance(result, StatelessResult)]


# ---- the language model ----------------------------------------------------------------------------


def test_the_language_model_is_a_llama_under_its_published_name() -> None:
    node = load(tiny_orpheus(), "LLM")

    assert isinstance(node, DecoderLM)
    assert (node.name, node.architecture, node.vocab_size) == ("LLM", "LlamaForCausalLM", 156940)
    assert node.layout == KVLayout(layers=2, kv_heads=1, head_dim=8)
    assert node.max_positions == 131072


def test_another_node_is_a_bug() -> None:
    with pytest.raises(BugError, match="orpheus has no node 'prepare' with weights"):
        load(tiny_orpheus(), "prepare")


# ---- sound -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 3, 7, 20, 28, 34, 70, 83])
def test_a_stream_equals_the_same_windows_decoded_by_the_package(decoder: SnacDecoder, tokens: int) -> None:
    stream = firings(audio_tokens(tokens))

    found = sounds(decoder, stream)

    assert all(map(torch.equal, found, [sound_of(item) for item in stream]))
    assert sum(map(len, found)) == tokens // 7 * 2048
    assert {sound.dtype for sound in found} == {torch.int16}


def test_windows_are_close_to_one_decode_of_the_whole(tmp_path: Path) -> None:
    """Without noise, which differs between windows: the rest is the error of the windows' limited context."""
    node = SnacDecoder(load_snac(write_snac(tmp_path, noise=False), CPU), rows=1)
    tokens = audio_tokens(70)
    whole = Item(inputs={"token": tokens}, args={}, chunk=ChunkOf(number=0, fresh=70, last=True))
    found, expected = torch.cat(sounds(node, firings(tokens))).float(), sounds(node, [whole])[0].float()

    def error(other: torch.Tensor) -> float:
        return float((found - other).norm() / other.norm())

    assert error(expected) < 0.01
    assert error(expected.roll(2048)) > 0.2  # a frame too late is another sound


def test_noise_depends_on_the_request_and_the_chunk(decoder: SnacDecoder) -> None:
    window = audio_tokens(28)

    def sound(seed: int, number: int) -> torch.Tensor:
        chunk = ChunkOf(number=number, fresh=7, last=False)
        [found] = sounds(decoder, [Item(inputs={"token": window}, args={}, seed=seed, chunk=chunk)])
        return found

    assert torch.equal(sound(1, 1), sound(1, 1))
    assert not torch.equal(sound(1, 1), sound(2, 1))
    assert not torch.equal(sound(1, 1), sound(1, 2))
    assert len(sound(-(2**63), 1)) == 2048


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_window_does_not_depend_on_its_batch(rows: int) -> None:
    """All forwards of a node have one shape, so no bit depends on the rest of the batch."""
    node = SnacDecoder(load_snac(tiny_orpheus() / "snac", CPU), rows=rows)
    items = [item for seed in range(3) for item in firings(audio_tokens(31 + 7 * seed, seed), seed)]

    alone = [sounds(node, [item])[0] for item in items]

    assert all(map(torch.equal, sounds(node, items), alone))
    assert all(map(torch.equal, sounds(node, items[::-1])[::-1], alone))


def test_the_number_of_threads_changes_no_bit(decoder: SnacDecoder) -> None:
    found: list[torch.Tensor] = []

    def fire(threads: int) -> None:
        torch.set_num_threads(threads)
        found.extend(sounds(decoder, firings(audio_tokens(35))))

    for threads in (1, 2, 1):  # torch gives new threads what another one has set last
        thread = Thread(target=fire, args=(threads,))
        thread.start()
        thread.join()

    third = len(found) // 3
    assert third > 1
    assert all(map(torch.equal, found[: 2 * third], found[third:]))


def test_a_token_in_another_place_of_its_frame_is_a_code_too(decoder: SnacDecoder) -> None:
    tokens = audio_tokens(28)
    moved = FIRST_AUDIO + (tokens - FIRST_AUDIO) % 4096  # all of the first place

    assert all(map(torch.equal, sounds(decoder, firings(tokens)), sounds(decoder, firings(moved))))


@pytest.mark.parametrize("wrong", [128265, 128266 + 7 * 4096])
def test_an_invalid_token_fails_only_its_own_window(decoder: SnacDecoder, wrong: int) -> None:
    tokens = audio_tokens(28)
    spoilt = tokens.clone()
    spoilt[9] = wrong
    good, bad = firings(tokens)[0], firings(spoilt)[0]

    first, failed, last = decoder.run([good, bad, good])

    assert isinstance(first, StatelessResult)
    assert isinstance(last, StatelessResult)
    assert torch.equal(first.outputs["audio"], last.outputs["audio"])
    assert isinstance(failed, BugError)
    assert str(failed) == f"expected audio tokens, from 128266 to 156937, found {wrong}"


def test_an_item_without_a_chunk_is_a_bug(decoder: SnacDecoder) -> None:
    with pytest.raises(BugError, match="takes chunks of a stream"):
        decoder.run([Item(inputs={"token": audio_tokens(28)}, args={})])


# ---- the folder ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_safetensors_are_preferred_to_a_pickle(tmp_path: Path, decoder: SnacDecoder) -> None:
    folder = write_snac(tmp_path)
    pickle = folder / "pytorch_model.bin"
    save_file(torch.load(pickle, weights_only=True), folder / "model.safetensors")
    pickle.write_bytes(b"nothing anybody should read")

    node = load(tiny_orpheus(), "snac_decoder", kwargs={"snac": str(folder)})

    assert isinstance(node, SnacDecoder)
    assert torch.equal(
        sounds(node, firings(audio_tokens(28)))[0], sounds(decoder, firings(audio_tokens(28)))[0]
    )


class _Code:
    """Code that a pickle would run when it is loaded."""

    def __reduce__(self) -> Any:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (_Code(), "expected only tensors, found UnpicklingError"),
        ([1], "expected named tensors, found list"),
        ({"a": torch.zeros(1)}, "do not fit its config.json"),
        (b"PK", "cannot be read"),
        (None, "has no weights: expected model.safetensors or pytorch_model.bin"),
    ],
)
def test_invalid_weights_are_refused_and_no_code_is_run(
    tmp_path: Path, content: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_snac(tmp_path) / "pytorch_model.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is None:
        path.unlink()
    else:
        torch.save(content, path)

    with pytest.raises(CheckpointError, match=said):
        load_snac(tmp_path, CPU)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"codebook_size": 64}, "codebook_size is 64, expected 4096"),
        ({"sampling_rate": 44100}, "sampling_rate is 44100, expected 24000"),
        ({"vq_strides": [4, 4, 1]}, r"vq_strides is \[4, 4, 1\], expected \[4, 2, 1\]"),
        ({"decoder_rates": [8, 4, 4, 2]}, "samples per code is 256, expected 512"),
    ],
)
def test_a_snac_with_other_settings_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=f"is not the SNAC of Orpheus: {said}"):
        load_snac(write_snac(tmp_path, **changes), CPU)


def test_an_invalid_snac_config_is_named(tmp_path: Path) -> None:
    path = write_snac(tmp_path) / "config.json"
    path.write_text(json.dumps({"hop": 3}))

    with pytest.raises(CheckpointError, match=r"config\.json makes no SNAC: TypeError: .*hop"):
        load_snac(tmp_path, CPU)


def test_snac_is_found_by_path_in_the_folder_or_in_the_same_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companions, "HF_HUB_CACHE", str(tmp_path / "none"))
    cache = tmp_path / "hub"
    checkpoint = cache / "models--canopylabs--orpheus-3b-0.1-ft" / "snapshots" / "abc"
    checkpoint.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"SNAC is missing: .* model_kwargs.snac"):
        find_snac(checkpoint, None)

    published = cache / "models--hubertsiuzdak--snac_24khz"
    (published / "refs").mkdir(parents=True)
    (published / "refs" / "main").write_text("def")
    (published / "snapshots" / "def").mkdir(parents=True)
    assert find_snac(checkpoint, None) == published / "snapshots" / "def"

    monkeypatch.setattr(companions, "HF_HUB_CACHE", str(cache))
    assert find_snac(tmp_path / "elsewhere", None) == published / "snapshots" / "def"

    (checkpoint / "snac").mkdir()
    assert find_snac(checkpoint, None) == checkpoint / "snac"
    assert find_snac(checkpoint, "/x/y") == Path("/x/y")


def test_a_damaged_folder_is_named_by_the_node_too(tmp_path: Path) -> None:
    (copied(tmp_path) / "snac" / "config.json").unlink()

    with pytest.raises(CheckpointError, match=r"snac/config\.json cannot be read"):
        load(tmp_path, "snac_decoder")
