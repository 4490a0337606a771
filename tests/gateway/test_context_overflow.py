import pytest

from gateway.context_overflow import CODE, in_openais_words
from models.decoder_lm.graph import new_token_budget
from shared.errors import ClientError
from shared.events import Failure, Limits
from tests.gateway.world import CHAT, Performance, deployment


def overflow(*, max_seq_len: int, kv_tokens: int) -> str:
    """The message of the plan for 8 prompt tokens and an answer of 10."""
    limits = Limits(max_seq_len=max_seq_len, kv_tokens=kv_tokens, default_max_tokens=1)
    with pytest.raises(ClientError) as caught:
        new_token_budget(8, 10, limits)
    return caught.value.message


async def test_an_overflow_is_in_the_words_that_clients_recognise() -> None:
    message = overflow(max_seq_len=16, kv_tokens=100)

    async def reject(performance: Performance) -> None:
        performance.reject(Failure(code=CODE, message=message, status=400))

    async with deployment(reject) as world:
        answer = await world.client.post("/v1/chat/completions", json=CHAT)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (400, CODE, "invalid_request_error")
    assert error["message"] == (
        "This model's maximum context length is 16 tokens. However, you requested 18 tokens (8 in the "
        "messages, 10 in the completion). Please reduce the length of the messages or completion."
    )


def test_the_size_of_the_kv_cache_is_named() -> None:
    message = in_openais_words(CODE, overflow(max_seq_len=100, kv_tokens=16))
    assert message.startswith(
        "This model's maximum context length is 16 tokens here, the size of the KV cache."
    )


def test_a_prompt_that_is_too_long_alone_is_in_the_same_words() -> None:
    said = "the model's context length is 16 tokens, but the prompt alone has at least 99; shorten it"
    assert in_openais_words(CODE, said) == (
        "This model's maximum context length is 16 tokens. However, your messages resulted in at least 99 "
        "tokens. Please reduce their length."
    )
    assert in_openais_words("other", said) == said
