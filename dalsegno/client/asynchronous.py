"""`AsyncClient`: sends requests to a deployment, over HTTP or NATS depending on the address."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack
from urllib.parse import urlsplit

from dalsegno.client.answer import Answer, Ranked, ranked
from dalsegno.client.http_transport import HttpTransport
from dalsegno.client.images import image_of, image_request
from dalsegno.client.media import Audio, MediaItem, Medium
from dalsegno.client.request import ClientRequest, Messages, RequestOptions, client_request
from dalsegno.client.stream import AsyncStream
from dalsegno.client.transport import ClientTransport, Health
from dalsegno.client.videos import video_of, video_request
from models.base import EMBEDDING, SCORE
from shared.errors import ClientError
from shared.ids import is_prefix
from shared.log.nats.credentials import Credentials

PATIENCE_S = 60.0


class AsyncClient:
    """A client of one deployment.

        async with AsyncClient("http://127.0.0.1:8000") as client:
            answer = await client.generate("What does len do?")
            async for chunk in client.stream("What does zip do?"):
                print(chunk.text, end="")

    Args:
        address: `http://host:port`, `https://...`, or `nats://host:port`, `tls://...`; for several gateways,
        or the
            servers of a NATS cluster, a list, or a text with commas. `host:port` alone, and a `/v1` at the
            end, are accepted, because other clients use them.
        api_key: for HTTP, sent as a bearer token.
        token: for NATS.
        credentials: for NATS servers that require more than a token.
        prefix: the deployment's subject prefix, for NATS.
        patience_s: seconds for which an interrupted answer is retried; 0 disables it.

    Every call accepts the options listed in `dalsegno.client.request.RequestOptions`.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        token: str | None = None,
        credentials: Credentials | None = None,
        prefix: str = "ds",
        patience_s: float = PATIENCE_S,
    ) -> None:
        if token is not None and credentials is not None:
            raise ClientError("token= and credentials= both authenticate the client: use one of them")
        shown = credentials or Credentials(token=token)
        self._transport = _transport(address, api_key=api_key, credentials=shown, prefix=prefix)
        self._patience_s = patience_s

    async def generate(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> Answer:
        """Return the complete answer."""
        return await self.stream(text, messages=messages, request_id=request_id, **how).read()

    async def chat(
        self, messages: str | Messages, *, request_id: str | None = None, **how: Unpack[RequestOptions]
    ) -> Answer:
        """Return the answer to a chat, or to one user message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.stream(messages=messages, request_id=request_id, **how).read()

    async def speech(
        self, text: str, *, request_id: str | None = None, **how: Unpack[RequestOptions]
    ) -> Audio:
        """Return the speech that a model generates from a text; `voice` is one of the model's."""
        how.setdefault("output_modalities", ("audio",))
        answer = await self.stream(text, request_id=request_id, **how).read()
        if answer.audio is None:
            raise ClientError("the answer has no sound: the model generated none", code="no_sound")
        return answer.audio

    async def generate_image(
        self,
        prompt: str,
        *,
        size: str | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> Medium:
        """Return the image that a model draws: a file. `size` is `WIDTHxHEIGHT` in pixels."""
        stream = self.stream(prompt, request_id=request_id, **image_request(how, size))
        return image_of(await stream.read())

    async def edit_image(
        self,
        prompt: str,
        images: MediaItem,
        /,
        *,
        size: str | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> Medium:
        """Return what a model makes of one image or of several, as `prompt` says."""
        how["images"] = images
        return await self.generate_image(prompt, size=size, request_id=request_id, **how)

    async def generate_video(
        self,
        prompt: str,
        *,
        size: str | None = None,
        seconds: float | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> Medium:
        """Return the video that a model makes: a file.

        `size` is `WIDTHxHEIGHT` in pixels, `seconds` the length; `images` is the one to begin with.
        """
        stream = self.stream(prompt, request_id=request_id, **video_request(how, size, seconds))
        return video_of(await stream.read())

    async def embed(
        self, text: str, *, request_id: str | None = None, **how: Unpack[RequestOptions]
    ) -> list[float]:
        """Return the embedding of a text, as the checkpoint defines it."""
        how.setdefault("output_modalities", (EMBEDDING,))
        how.setdefault("chat", False)
        answer = await self.stream(text, request_id=request_id, **how).read()
        if answer.embedding is None:
            raise ClientError("the answer has no embedding", code="no_embedding")
        return answer.embedding

    async def embed_all(
        self, texts: Sequence[str], /, *, request_id: str | None = None, **how: Unpack[RequestOptions]
    ) -> list[list[float]]:
        """Return the embedding of each text, by a model that takes several texts in a request.

        `images` may be given beside them, or alone: their embeddings come after those of the texts.
        """
        how.setdefault("output_modalities", (EMBEDDING,))
        how["texts"] = list(texts)
        answer = await self.stream(request_id=request_id, **how).read()
        if answer.embeddings is None:
            raise ClientError("the answer has no embeddings", code="no_embedding")
        return answer.embeddings

    async def score(
        self,
        queries: str | Sequence[str],
        texts: Sequence[str],
        /,
        *,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> list[float]:
        """Return the score of each text by a reranker, against one query or each against its own."""
        how.setdefault("output_modalities", (SCORE,))
        how["texts"] = list(texts)
        how["queries"] = [queries] if isinstance(queries, str) else list(queries)
        answer = await self.stream(request_id=request_id, **how).read()
        if answer.scores is None:
            raise ClientError("the answer has no scores", code="no_scores")
        return answer.scores

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> list[Ranked]:
        """Return the documents by their relevance to a query, the most relevant first; `top_n` of them."""
        scores = await self.score(query, documents, request_id=request_id, **how)
        return ranked(documents, scores)[:top_n]

    async def warm(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> int:
        """Compute a prefix that later requests share; return the number of its tokens now cached."""
        how["warm"] = True
        answer = await self.stream(text, messages=messages, request_id=request_id, **how).read()
        return answer.usage.cached_tokens if answer.usage is not None else 0

    def stream(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> AsyncStream:
        """Return the answer as a stream. The request is sent when the stream is first read."""
        return self._stream(client_request(text, messages, request_id, how), -1)

    def resume(
        self,
        request_id: str,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        after: int = -1,
        **how: Unpack[RequestOptions],
    ) -> AsyncStream:
        """Return the rest of an earlier request's answer, after its chunk `after`.

        The request must be repeated unchanged: the same id means the same request. It may come from another
        process, and over another transport.
        """
        return self._stream(client_request(text, messages, request_id, how), after)

    async def cancel(self, request_id: str) -> None:
        """Cancel a request; one that has ended already is left unchanged."""
        await self._transport.cancel(request_id)

    async def health(self) -> Health:
        """Return the server's health."""
        return await self._transport.health()

    async def models(self) -> list[str]:
        """Return the names of the served models."""
        return await self._transport.models()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _stream(self, request: ClientRequest, after: int) -> AsyncStream:
        return AsyncStream(self._transport, request, after=after, patience_s=self._patience_s)


def _transport(
    address: str | Sequence[str], *, api_key: str | None, credentials: Credentials, prefix: str
) -> ClientTransport:
    parts = address.split(",") if isinstance(address, str) else list(address)
    addresses = _as_one_kind([one.strip() for one in parts if one.strip()])
    match {_scheme(one) for one in addresses}:
        case schemes if schemes and schemes <= {"http", "https"}:
            return HttpTransport(*addresses, api_key=api_key)
        case schemes if schemes and schemes <= {"nats", "tls"}:
            from dalsegno.client.nats_transport import NatsTransport

            if not is_prefix(prefix):
                raise ClientError(
                    f"prefix {prefix[:80]!r} cannot be used: expected 1 to 64 small letters, digits, _ or -"
                )
            return NatsTransport(",".join(addresses), credentials=credentials, prefix=prefix)
    raise ClientError(
        f"{address!r} is not an address of a deployment: expected http://host:port or nats://host:port, or "
        "several of one kind"
    )


def _as_one_kind(addresses: Sequence[str]) -> list[str]:
    """Complete addresses without a scheme: with the first address's scheme, else HTTP."""
    scheme = addresses[0].partition("://")[0] if addresses and "://" in addresses[0] else "http"
    whole = [one if "://" in one else f"{scheme}://{one}" for one in addresses]
    return [one.rstrip("/").removesuffix("/v1") for one in whole]


def _scheme(address: str) -> str:
    """Return an address's scheme; empty if it is not an address.

    Raises:
        ClientError: it cannot be parsed.
    """
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise ClientError(f"{address!r} is not an address of a deployment: {error}") from error
    return parts.scheme if parts.hostname else ""
