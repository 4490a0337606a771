"""A key is sent as a header, or refused without being repeated: by a client's author, and by `ask`."""

import socket

import pytest

from dalsegno import AsyncClient, ClientError
from dalsegno.ask.chat import ChatPrompt, stream_answer
from dalsegno.client.bearer_token import bearer

UNSENDABLE = ("", "\n", "sesame\nopen", "sesame open", "sésame")


def test_the_newline_a_file_ends_with_is_no_part_of_a_key() -> None:
    assert bearer("sesame\r\n") == "Bearer sesame"


@pytest.mark.parametrize("key", UNSENDABLE)
def test_a_key_that_cannot_be_sent_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ClientError, match="expected printable ASCII") as refused:
        AsyncClient(api_key=key)

    assert "same" not in refused.value.message


@pytest.mark.processes
def test_a_command_refuses_it_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        prompt = ChatPrompt(url=url, text="hi", model="demo", api_key="sesame\nopen")
        with pytest.raises(ClientError, match="the API key cannot be sent"):
            list(stream_answer(prompt, notice=lambda _: None))
