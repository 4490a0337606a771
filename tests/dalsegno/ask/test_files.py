"""`dalsegno ask --file`: what the server receives."""

import asyncio
import hashlib
from pathlib import Path

import pytest

from dalsegno.ask import files
from dalsegno.ask.chat import ChatPrompt, stream_answer
from dalsegno.ask.files import client_arguments, message_content
from shared.errors import ClientError
from tests.gateway.media.world import MP4, png, seeing, submitted
from tests.gateway.world import listening


def nothing_to_store(path: Path, digest: str) -> None:
    pytest.fail(f"{path} was stored")


@pytest.mark.processes
@pytest.mark.parametrize("inline_bytes", [1 << 20, 10])
async def test_a_question_about_a_file_reaches_the_model_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int
) -> None:
    monkeypatch.setattr(files, "INLINE_BYTES", inline_bytes)
    path = tmp_path / "cat.png"
    path.write_bytes(png())
    async with seeing() as world, listening(world) as url:
        prompt = ChatPrompt(text="What is it?", url=url, files=(path,))
        pieces = await asyncio.to_thread(lambda: list(stream_answer(prompt, pytest.fail)))
        inputs = submitted(world).inputs

    [file] = inputs.files
    assert "".join(pieces) == "image"
    assert (file.name, file.digest) == ("cat.png", hashlib.sha256(png()).hexdigest())
    assert inputs.messages is not None
    assert inputs.messages[0]["content"][1] == {"type": "text", "text": "What is it?"}


def test_a_question_without_files_is_its_text() -> None:
    assert message_content("len?", [], nothing_to_store) == "len?"


def test_files_are_arguments_of_the_client_by_their_content(tmp_path: Path) -> None:
    image, video, text = tmp_path / "a.bin", tmp_path / "b.bin", tmp_path / "c.png"
    image.write_bytes(png())
    video.write_bytes(MP4)
    text.write_bytes(b"words")

    assert client_arguments([video, image]) == {"video": [video], "images": [image]}
    with pytest.raises(ClientError, match=r"c\.png: expected an image"):
        client_arguments([text])


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ClientError, match=r"/nowhere/cat\.png cannot be read"):
        message_content("What?", [Path("/nowhere/cat.png")], nothing_to_store)
