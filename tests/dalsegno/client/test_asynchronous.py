"""A client is made of what can be meant; nothing is sent yet."""

import pytest

from dalsegno import AsyncClient, ClientError, Credentials
from tests.hostile import NO_TOKENS


@pytest.mark.parametrize("prefix", [*NO_TOKENS.values(), "DS"], ids=[*NO_TOKENS, "capitals"])
def test_a_prefix_that_can_be_none_is_refused(prefix: str) -> None:
    with pytest.raises(ClientError, match="prefix"):
        AsyncClient("nats://127.0.0.1:4222", prefix=prefix)


def test_a_token_and_credentials_are_one_too_many() -> None:
    with pytest.raises(ClientError, match="use one of them"):
        AsyncClient("nats://127.0.0.1:4222", token="sesame", credentials=Credentials(token="sesame"))
