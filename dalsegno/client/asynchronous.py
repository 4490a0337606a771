"""`AsyncClient`: asks a deployment, over HTTP or NATS by the address."""

from types import TracebackType
from typing import Self, Unpack
from urllib.parse import urlsplit

from dalsegno.client.answer import Answer
from dalsegno.client.media import Audio
from dalsegno.client.over_http import HttpTransport
from dalsegno.client.question import How, Messages, Question, question
from dalsegno.client.stream import AsyncStream
from dalsegno.client.transport import Health, Transport
from shared.errors import ClientError

PATIENCE_S = 60.0


class AsyncClient:
    """A client of one deployment.

        async with AsyncClient("http://127.0.0.1:8000") as client:
            answer = await client.generate("What does len do?")
            async for chunk in client.stream("What does zip do?"):
                print(chunk.text, end="")

    Args:
        address: `http://host:port`, `https://...`, or `nats://host:port`, `tls://...`. As others write
            it, it may be `host:port` alone, or end in `/v1`.
        api_key: for HTTP, sent as a bearer token.
        token: for NATS.
        prefix: the deployment's, for NATS.
        patience_s: how long a broken answer is tried to be taken up again; 0 is not at all.

    Every call takes what `dalsegno.client.question.How` lists.
    """

    def __init__(
        self,
        address: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        token: str | None = None,
        prefix: str = "ds",
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._transport = _transport(address, api_key=api_key, token=token, prefix=prefix)
        self._patience_s = patience_s

    async def generate(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        **how: Unpack[How],
    ) -> Answer:
        """The answer, once it is complete."""
        return await self.stream(text, messages=messages, request_id=request_id, **how).read()

    async def chat(
        self, messages: str | Messages, *, request_id: str | None = None, **how: Unpack[How]
    ) -> Answer:
        """The answer to a chat, or to one message of it."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.stream(messages=messages, request_id=request_id, **how).read()

    async def speech(self, text: str, *, request_id: str | None = None, **how: Unpack[How]) -> Audio:
        """What a model that speaks makes of a text, whole; `voice` is one of the model's."""
        how.setdefault("output_modalities", ("audio",))
        answer = await self.stream(text, request_id=request_id, **how).read()
        if answer.audio is None:
            raise ClientError("the model said nothing: its answer has no sound", code="no_sound")
        return answer.audio

    def stream(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        **how: Unpack[How],
    ) -> AsyncStream:
        """The answer as it comes. Nothing is asked before it is read."""
        return self._stream(question(text, messages, request_id, how), -1)

    def resume(
        self,
        request_id: str,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        after: int = -1,
        **how: Unpack[How],
    ) -> AsyncStream:
        """The answer to a request that was asked before, behind its chunk `after`.

        The question is said again as it was: the same id is the same question. It may come from another
        process, and go over another transport.
        """
        return self._stream(question(text, messages, request_id, how), after)

    async def cancel(self, request_id: str) -> None:
        """Have a request end; one that has ended already stays as it is."""
        await self._transport.cancel(request_id)

    async def health(self) -> Health:
        """How the server is."""
        return await self._transport.health()

    async def models(self) -> list[str]:
        """The names of the models that are served."""
        return await self._transport.models()

    async def aclose(self) -> None:
        """Let go of the connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _stream(self, asked: Question, after: int) -> AsyncStream:
        return AsyncStream(self._transport, asked, after=after, patience_s=self._patience_s)


def _transport(address: str, *, api_key: str | None, token: str | None, prefix: str) -> Transport:
    try:
        address = (address if "://" in address else f"http://{address}").rstrip("/").removesuffix("/v1")
        parts = urlsplit(address)
    except ValueError as error:
        raise ClientError(f"{address!r} is no address of a deployment: {error}") from error
    scheme = parts.scheme if parts.hostname else ""
    if scheme in {"http", "https"}:
        return HttpTransport(address, api_key=api_key)
    if scheme in {"nats", "tls"}:
        from dalsegno.client.over_nats import NatsTransport

        return NatsTransport(address, token=token, prefix=prefix)
    raise ClientError(
        f"{address!r} is no address of a deployment: expected http://host:port or nats://host:port"
    )
