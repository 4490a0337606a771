"""The credentials of a process for a NATS server, and the certificates by which it verifies the server.

No secret appears in a `repr`, so no log line and no traceback contains one.
"""

import ssl
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Final

from shared.errors import ClientError
from shared.ids import is_token
from shared.log.nats import nkeys


class CredentialsError(ClientError):
    """Credentials that cannot be used. The message names the credential but none of its secrets."""

    code = "nats_credentials"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """The credentials for a server: an nkey, or else a name and password, or else a token, or else none.

    Attributes:
        token: the secret of a server with one token for all clients.
        user: the name that belongs to the password.
        seed: the seed of an nkey. It signs a server's challenge and never leaves the process.
        ca_file: the trusted certificates. With it, nothing is sent to a server without TLS.
        cert_file: the client's certificate, if the server requires one.
        key_file: the private key of that certificate.

    Raises:
        CredentialsError: the seed is invalid, or a name has no password.
    """

    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    seed: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password is None):
            raise CredentialsError("expected both a NATS user and its password, found one of them")
        if (self.cert_file is None) != (self.key_file is None):
            raise CredentialsError("expected both a certificate and its private key, found one of them")
        if self.seed is not None:
            _ = self.public_key

    @cached_property
    def public_key(self) -> str | None:
        """The public nkey, by which the server knows this client."""
        try:
            return nkeys.public_key(self.seed) if self.seed is not None else None
        except nkeys.SeedError as error:
            raise CredentialsError(str(error)) from None

    def as_dict(self) -> dict[str, str]:
        """Return all fields that are set, including secrets, as arguments for another `Credentials`."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def inbox_prefix(self) -> str:
        """The subject prefix for replies: a private one for a named client, else NATS' default."""
        who = self.public_key or self.user or ""
        return f"_INBOX_{who}" if is_token(who) else "_INBOX"

    @property
    def description(self) -> str:
        """The kind of credentials, for messages; without secrets."""
        if self.public_key is not None:
            return f"the key {self.public_key}"
        return f"the user {self.user!r} and its password" if self.user is not None else "the token"

    def sign(self, nonce: str) -> bytes:
        """Return the signature for a server's challenge."""
        assert self.seed is not None
        return nkeys.sign(self.seed, nonce)

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context that verifies the server; None if no certificates are configured.

        Raises:
            CredentialsError: a file cannot be read, or is not a certificate or key.
        """
        if self.ca_file is None and self.cert_file is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # includes ssl.SSLError
            files = ", ".join(
                name for name in (self.ca_file, self.cert_file, self.key_file) if name is not None
            )
            raise CredentialsError(f"cannot use {files} for TLS: {error.strerror or error}") from error
        return context


ANONYMOUS: Final = Credentials()
"""No credentials, for a server that requires none."""
