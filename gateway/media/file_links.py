"""Addresses of outputs that are stored as files, under their digests: `/v1/files/{id}/content`."""

from dataclasses import dataclass

from starlette.requests import Request

from gateway.client_key import key_name
from gateway.media.sources import FILE_PREFIX
from gateway.requests.service import Gateway


@dataclass(frozen=True, slots=True)
class FileLinks:
    """Stores outputs for one client.

    Attributes:
        base: the address of this gateway as the client named it, without a slash at its end.
        tenant: the owner of the files; None in a deployment without keys.
    """

    gateway: Gateway
    base: str
    tenant: str | None

    @classmethod
    def of(cls, gateway: Gateway, request: Request) -> "FileLinks":
        """The links for the client of an HTTP request."""
        return cls(gateway, str(request.base_url).rstrip("/"), key_name(request.scope))

    async def stored(self, data: bytes, content_type: str) -> str:
        """Store a file, and return its address.

        Raises:
            CapacityError: the store is full, or does not answer.
        """
        medium = await self.gateway.media_store.put(data, tenant=self.tenant, content_type=content_type)
        return f"{self.base}/v1/files/{FILE_PREFIX}{medium.digest}/content"
