import socket
import wave
from io import BytesIO
from pathlib import Path

import pytest

from dalsegno import AsyncClient, CapacityError, ClientError, DalSegnoError
from dalsegno.client import (
    AuthenticationError,
    BrokenError,
    BusyError,
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    RequestCancelledError,
    RequestExpiredError,
    ServerError,
    UnreachableError,
)
from tests.dalsegno.client.gateway import Break, Hang, Line, answering, end, error, line, talking, text

pytestmark = pytest.mark.processes


PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"


# ---- text --------------------------------------------------------------------------------------------


async def test_the_answer_is_all_chunks_and_its_end() -> None:
    async with talking([text(0, "grö"), text(1, "ßer"), end("length")]) as (_, client):
        answer = await client.generate("hi", request_id="mine")

    assert (answer.request_id, answer.text, answer.token_ids) == ("mine", "größer", [0, 1])
    assert answer.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 5)
    assert (answer.images, answer.audio, answer.logprobs) == ([], None, None)


async def test_a_stream_gives_each_chunk_as_it_comes_and_the_answer_so_far() -> None:
    async with (
        talking([text(0, "one"), text(1, " two"), end()]) as (_, client),
        client.stream("hi") as stream,
    ):
        first = await anext(stream)
        so_far, reason = stream.answer.text, stream.answer.finish_reason
        rest = [chunk.text async for chunk in stream]

    assert (first.index, first.text, first.token_ids) == (0, "one", [0])
    assert (so_far, reason) == ("one", None)
    assert rest == [" two"]
    assert (stream.answer.text, stream.answer.finish_reason) == ("one two", "stop")


async def test_what_is_asked_is_sent_by_the_names_of_the_page_and_nothing_else_is() -> None:
    async with talking([end()], [end()], [end()]) as (fake, client):
        await client.generate("hi", request_id="a", max_tokens=9, temperature=0, stop="x", model="demo")
        await client.chat("hello", request_id="b", seed=1)
        await client.generate(token_ids=(1, 2), request_id="c")

    plain = {"input_modalities": "text", "tensor_format": "raw", "linger_s": 30.0}
    kwargs = {"max_tokens": 9, "temperature": 0.0, "stop": ["x"]}
    assert [asked.fields for asked in fake.asked] == [
        {"text": "hi", "model_kwargs": kwargs, "model": "demo", "request_id": "a", **plain},
        {
            "messages": [{"role": "user", "content": "hello"}],
            "model_kwargs": {"seed": 1},
            "request_id": "b",
            **plain,
        },
        {"token_ids": [1, 2], "request_id": "c", **plain},
    ]


async def test_every_request_has_an_id_the_client_chose() -> None:
    async with talking([end()], [end()]) as (fake, client):
        answers = [await client.generate("hi"), await client.generate("hi")]

    assert [asked.fields["request_id"] for asked in fake.asked] == [answer.request_id for answer in answers]
    assert answers[0].request_id != answers[1].request_id


async def test_log_probabilities_come_with_their_tokens() -> None:
    told = [
        {"id": 7, "token": "YQ==", "logprob": -0.5, "top": [{"id": 8, "token": "Yg==", "logprob": -0.25}]}
    ]
    async with talking([text(0, "a", logprobs=told), end()]) as (_, client):
        answer = await client.generate("hi", logprobs=1)

    assert answer.logprobs is not None
    [token] = answer.logprobs
    assert (token.id, token.token, token.logprob) == (7, b"a", -0.5)
    assert (token.top[0].token, token.top[0].logprob) == (b"b", -0.25)


async def test_the_tokens_of_an_echo_are_the_prompts() -> None:
    told = [{"id": 7, "token": "YQ=="}]
    echoed = line("text", b"hi ", index=0, token_ids=[7], logprobs=told, echo=True)
    async with talking([echoed, text(1, "a"), end()]) as (_, client):
        answer = await client.generate("hi", echo=True, logprobs=0)

    assert (answer.text, answer.token_ids, answer.logprobs) == ("hi a", [1], None)
    assert answer.prompt_token_ids == [7]
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0].logprob is None


async def test_a_line_ends_where_json_lines_end_and_nowhere_else() -> None:
    separators = "a\u2028b\x0bc\u0085d"
    odd = line("text", b"x", index=0, note=separators).replace(b"\\u2028", separators[1].encode())
    async with talking([odd[:20], odd[20:], end()]) as (_, client), client.stream("hi") as stream:
        [chunk] = [chunk async for chunk in stream]

    assert chunk.metadata == {"note": separators}


# ---- media -------------------------------------------------------------------------------------------


async def test_media_are_sent_as_files_whose_names_tell_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "cat.JPG"
    path.write_bytes(b"\xff\xd8\xffcat")
    async with talking([end()]) as (fake, client):
        await client.generate(
            "what is it?",
            images=[str(path), PNG, ("dog.webp", b"dog")],
            audio=b"RIFF....WAVEsound",
            max_tokens=3,
            output_modalities=["text", "audio"],
        )

    [asked] = fake.asked
    assert asked.files == [
        ("cat.JPG", b"\xff\xd8\xffcat"),
        ("image-1.png", PNG),
        ("dog.webp", b"dog"),
        ("audio-0.wav", b"RIFF....WAVEsound"),
    ]
    assert asked.fields["input_modalities"] == "image,audio,text"
    assert asked.fields["output_modalities"] == "text,audio"
    assert asked.fields["model_kwargs"] == '{"max_tokens":3}'


async def test_images_and_sound_come_back_whole(tmp_path: Path) -> None:
    script = [
        text(0, "here"),
        line("audio", b"\x01\x00\x02\x00", index=1, sample_rate=16_000),
        line("image", PNG, index=2, width=2),
        line("audio", b"\x03\x00", index=3, sample_rate=16_000),
        end(),
    ]
    async with (
        talking(script) as (_, client),
        client.stream("draw and sing", output_modalities=("text", "audio", "image")) as stream,
    ):
        chunks = [chunk async for chunk in stream]
        answer = stream.answer

    assert [chunk.modality for chunk in chunks] == ["text", "audio", "image", "audio"]
    assert chunks[1].audio.pcm == b"\x01\x00\x02\x00"
    assert answer.text == "here"
    assert answer.images[0].save(tmp_path / "cat.png").read_bytes() == PNG
    assert answer.images[0].metadata == {"width": 2}
    assert answer.audio is not None
    assert answer.audio.pcm == b"\x01\x00\x02\x00\x03\x00"
    with wave.open(BytesIO(answer.audio.save(tmp_path / "song.wav").read_bytes())) as song:
        assert (song.getframerate(), song.getnframes(), song.getsampwidth()) == (16_000, 3, 2)


async def test_speech_is_the_sound_of_the_answer_and_asks_for_it() -> None:
    script = [line("audio", b"\x01\x00", index=0, sample_rate=24_000, num_channels=1), end()]
    async with talking(script) as (fake, client):
        sound = await client.speech("Hello", voice="tara")

    assert (sound.pcm, sound.sample_rate) == (b"\x01\x00", 24_000)
    [asked] = fake.asked
    assert asked.fields["output_modalities"] == "audio"
    assert asked.fields["model_kwargs"] == {"voice": "tara"}


async def test_a_voice_asks_for_sound_whatever_it_is_asked_by() -> None:
    script = [line("audio", b"\x01\x00" * 4096, index=0, sample_rate=24_000), end()]
    async with talking(script) as (fake, client):
        answer = await client.generate("Hello", voice="tara")

    [asked] = fake.asked
    assert asked.fields["output_modalities"] == "audio"
    assert answer.audio is not None
    assert len(repr(answer)) + len(repr(answer.audio)) < 1000, "nobody reads samples"


async def test_speech_without_a_sound_is_an_error() -> None:
    async with talking([end()]) as (_, client):
        with pytest.raises(ClientError, match="the answer has no sound"):
            await client.speech("Hello")


# ---- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ClientError),
        (401, AuthenticationError),
        (403, AuthenticationError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, RequestCancelledError),
        (413, ClientError),
        (429, BusyError),
        (500, ServerError),
        (503, BusyError),
        (504, DeadlineExceededError),
    ],
)
async def test_a_refusal_is_an_error_of_its_kind_and_is_not_asked_again(
    status: int, kind: type[DalSegnoError]
) -> None:
    refusal = error(status, "some_code", "not so", "model_kwargs.seed", **{"retry-after": "7"})
    async with talking(refusal) as (fake, client):
        with pytest.raises(kind) as caught:
            await client.generate("hi")

    told = caught.value
    assert type(told) is kind
    assert (told.status, told.code, told.message, told.param) == (
        status, "some_code", "not so", "model_kwargs.seed",
    )  # fmt: skip
    assert str(told) == "not so"
    assert len(fake.asked) == 1
    if isinstance(told, BusyError):
        assert told.retry_after_s == 7


async def test_an_answer_that_fails_in_the_middle_raises_behind_what_was_told() -> None:
    failed = line("error", b"", status=500, code="worker_lost", message="gone")
    async with talking([text(0, "one"), failed]) as (_, client):
        stream = client.stream("hi")
        assert (await anext(stream)).text == "one"
        with pytest.raises(ServerError) as caught:
            await anext(stream)

    assert (caught.value.code, caught.value.status, caught.value.message) == ("worker_lost", 500, "gone")


async def test_something_else_that_answers_is_shown_as_it_is() -> None:
    async with talking([b"<html>\n"]) as (_, client):
        with pytest.raises(ClientError, match=r"not a Dal Segno server: .*<html>"):
            await client.generate("hi")


async def test_where_nobody_listens_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        async with AsyncClient(f"http://127.0.0.1:{port}") as client:
            for call in (client.generate("hi"), client.health(), client.models()):
                with pytest.raises(UnreachableError, match=f"no server answers at http://127.0.0.1:{port} "):
                    await call


async def test_an_address_is_http_or_nats() -> None:
    with pytest.raises(ClientError, match="expected http://host:port or nats://host:port"):
        AsyncClient("redis://127.0.0.1:8000")


@pytest.mark.parametrize("form", ["{}", "http://{}/", "http://{}/v1", "http://{}/v1/"])
async def test_an_address_may_be_written_as_for_other_clients(form: str) -> None:
    async with (
        talking([end()]) as (fake, _),
        AsyncClient(form.format(fake.url.removeprefix("http://"))) as client,
    ):
        await client.generate("hi")

    assert len(fake.asked) == 1


# ---- what breaks -------------------------------------------------------------------------------------


async def test_a_stream_that_breaks_goes_on_behind_the_last_chunk_under_its_own_id() -> None:
    scripts: tuple[list[Line], ...] = (
        [text(0, "a"), text(1, "b"), Break],
        [Break],
        [text(2, "c"), text(3, "d")[:-9], Break],
        [text(3, "d"), end()],
    )
    async with talking(*scripts) as (fake, client), client.stream("hi", seed=3) as stream:
        chunks = [chunk async for chunk in stream]

    assert [chunk.index for chunk in chunks] == [0, 1, 2, 3]
    assert (stream.answer.text, stream.resumed) == ("abcd", 3)
    assert [asked.headers.get("last-event-id") for asked in fake.asked] == [None, "1", "1", "2"]
    assert all(asked.fields == fake.asked[0].fields for asked in fake.asked)


async def test_a_whole_answer_survives_a_break_as_well() -> None:
    async with talking([text(0, "a"), Break], [text(1, "b"), end()]) as (_, client):
        answer = await client.generate("hi")

    assert answer.text == "ab"


async def test_a_gateway_that_begins_anew_repeats_nothing_to_the_reader() -> None:
    script = [text(0, "a"), text(1, "b"), end()]
    async with talking([text(0, "a"), Break], script) as (_, client):
        assert [chunk.text async for chunk in client.stream("hi")] == ["a", "b"]


async def test_a_stream_that_breaks_goes_on_at_the_next_gateway() -> None:
    async with (
        answering([text(0, "a"), text(1, "b"), Break], [text(3, "d"), end()]) as first,
        answering([text(2, "c"), Break]) as second,
        AsyncClient([first.url, second.url]) as client,
        client.stream("hi", seed=3) as stream,
    ):
        chunks = [chunk async for chunk in stream]
        await client.cancel(stream.request_id)

    assert [chunk.index for chunk in chunks] == [0, 1, 2, 3]
    assert stream.resumed == 2
    assert [asked.headers.get("last-event-id") for asked in (*first.asked, *second.asked)] == [None, "2", "1"]
    assert all(asked.fields == first.asked[0].fields for asked in (*first.asked, *second.asked))
    assert (first.cancelled, second.cancelled) == ([stream.request_id], [])  # where it was read last


async def test_a_request_that_was_taken_is_asked_for_again_though_all_gateways_are_gone_for_a_while() -> None:
    """The first died with it before it said a word, and when the second is asked nobody is there."""
    nobody = "http://127.0.0.1:9"
    async with (
        answering([Break], [text(0, "a"), end()]) as first,
        AsyncClient([first.url, nobody]) as client,
        client.stream("hi") as stream,
    ):
        assert [chunk.text async for chunk in stream] == ["a"]

    assert stream.resumed == 1
    assert first.asked[0].fields["request_id"] == first.asked[1].fields["request_id"] == stream.request_id


@pytest.mark.parametrize("refusal", ["nobody", "not now"])
async def test_a_gateway_that_takes_nothing_is_passed_over_from_the_first(refusal: str) -> None:
    async with (
        answering(error(503, "shutting_down")) as first,
        answering([text(0, "a"), end()], [end()]) as second,
    ):
        url = first.url if refusal == "not now" else "http://127.0.0.1:9"
        async with AsyncClient(f"{url},{second.url}/v1") as client:
            assert (await client.generate("hi")).text == "a"
            await client.generate("hi")
            assert (await client.health()).missing == ("no conductor leads",)

    assert (len(first.asked), len(second.asked)) == (refusal == "not now", 2)


async def test_where_all_gateways_refuse_the_last_says_why() -> None:
    async with (
        answering(error(503, "shutting_down")) as first,
        answering(error(503, "log_full")) as second,
        AsyncClient((first.url, second.url)) as client,
    ):
        with pytest.raises(BusyError) as refused:
            await client.generate("hi")

    assert refused.value.code == "log_full"
    assert (len(first.asked), len(second.asked)) == (1, 1)


@pytest.mark.parametrize("status", [400, 410, 429, 500])
async def test_what_another_gateway_would_say_as_well_is_asked_of_one(status: int) -> None:
    async with (
        answering(error(status, "no")) as first,
        answering([end()]) as second,
        AsyncClient([first.url, second.url]) as client,
    ):
        with pytest.raises(DalSegnoError):
            await client.generate("hi")

    assert second.asked == []


async def test_not_now_is_waited_out_where_the_request_was_taken_already() -> None:
    lost_log = line("error", b"", status=503, code="log_unavailable", message="ask again")
    scripts = ([text(0, "a"), lost_log], error(503, "not_ready"), error(429, "busy"), [text(1, "b"), end()])
    async with talking(*scripts) as (_, client):
        assert (await client.generate("hi")).text == "ab"


async def test_patience_ends() -> None:
    async with talking([text(0, "a"), Break], *[[Break]] * 9, patience_s=0.1) as (fake, client):
        with pytest.raises(BrokenError):
            await client.generate("hi")

    assert 2 <= len(fake.asked) <= 4


async def test_without_patience_nothing_is_asked_twice() -> None:
    async with talking([text(0, "a"), Break], patience_s=0) as (fake, client):
        with pytest.raises(CapacityError):
            await client.generate("hi")

    assert len(fake.asked) == 1


async def test_a_hole_in_the_answer_is_an_error_and_no_answer() -> None:
    async with talking([text(0, "a"), text(2, "c"), end()]) as (_, client):
        with pytest.raises(DalSegnoError, match="expected chunk 1, found 2") as caught:
            await client.generate("hi")

    assert caught.value.code == "output_mismatch"


async def test_a_refusal_after_a_break_is_told() -> None:
    cancelled = error(410, "request_cancelled", "the client disconnected")
    async with talking([text(0, "a"), Break], cancelled) as (_, client):
        with pytest.raises(RequestCancelledError, match="the client disconnected"):
            await client.generate("hi")


# ---- by hand -----------------------------------------------------------------------------------------


async def test_resume_asks_the_same_behind_the_chunk_that_is_named() -> None:
    async with (
        talking([text(6, "g"), end()]) as (fake, client),
        client.resume("mine", "hi", after=5, max_tokens=9) as stream,
    ):
        chunks = [(chunk.index, chunk.text) async for chunk in stream]

    assert chunks == [(6, "g")]
    [asked] = fake.asked
    assert (asked.fields["request_id"], asked.headers["last-event-id"]) == ("mine", "5")


async def test_leaving_a_stream_closes_its_connection() -> None:
    async with talking([text(0, "a"), Hang]) as (fake, client):
        async with client.stream("hi") as stream:
            await anext(stream)
        await fake.left.wait()

    assert stream.answer.finish_reason is None


async def test_a_stream_that_is_not_read_asks_nothing() -> None:
    async with talking() as (fake, client), client.stream("hi"):
        pass

    assert fake.asked == []


async def test_the_other_calls() -> None:
    async with talking() as (fake, client):
        health = await client.health()
        models = await client.models()
        await client.cancel("mine")

    assert (health.is_ready, health.status, health.missing) == (False, "loading", ("no conductor leads",))
    assert models == ["demo", "other"]
    assert fake.cancelled == ["mine"]


async def test_a_cancel_that_comes_too_late_is_none_and_one_of_nobody_is_an_error() -> None:
    async with talking() as (fake, client):
        fake.cancelling = error(409, "request_ended", "finished already")
        await client.cancel("mine")
        fake.cancelling = error(404, "request_not_found")
        with pytest.raises(NotFoundError):
            await client.cancel("mine")
        with pytest.raises(ClientError, match="cannot be used"):
            await client.cancel("../health")

    assert fake.cancelled == ["mine", "mine"]


async def test_what_the_server_has_forgotten_is_an_error_of_its_own() -> None:
    async with talking([text(0, "a"), Break], error(410, "request_expired")) as (_, client):
        with pytest.raises(RequestExpiredError):
            await client.generate("hi")


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), 86401])
async def test_a_time_limit_that_is_none_is_refused_before_it_is_sent(wrong: float) -> None:
    async with talking() as (fake, client):
        with pytest.raises(ClientError, match="timeout_s") as refused:
            await client.generate("hi", timeout_s=wrong)

    assert refused.value.param == "timeout_s"
    assert fake.asked == []


async def test_half_a_character_is_refused_before_it_is_sent() -> None:
    async with talking() as (fake, client):
        with pytest.raises(ClientError) as refused:
            await client.generate("hi", stop="\ud800")

    assert refused.value.code == "invalid_unicode"
    assert fake.asked == []


@pytest.mark.parametrize(
    "address", ["ftp://x", "http://[::1", "", ",", "http://a,nats://b", [], ["http://a", "ftp://b"]]
)
def test_what_is_no_address_is_refused_at_once(address: str | list[str]) -> None:
    with pytest.raises(ClientError, match="is not an address of a deployment"):
        AsyncClient(address)


async def test_the_key_goes_with_every_call() -> None:
    async with talking([end()], api_key="sesame") as (fake, client):
        await client.generate("hi")

    assert fake.asked[0].headers["authorization"] == "Bearer sesame"
