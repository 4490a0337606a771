"""Who a process is to a NATS server, and how it knows the server: one value, from the configuration on.

What is secret in it is in no `repr`, so that no log line and no traceback can hold it.
"""

import ssl
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Final

from shared.errors import ClientError
from shared.ids import is_token
from shared.log.nats import nkeys


class CredentialsError(ClientError):
    """Credentials that cannot be used; says which, and never what is secret in them."""

    code = "nats_credentials"


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What is shown to a server: an nkey, else a name and password, else a token, else nothing.

    Attributes:
        token: what a server with one secret for all asks for.
        user: the name that the password is of.
        seed: an nkey's; it stays here, and a server's challenge is signed with it.
        ca_file: whose certificates are believed; with it, nothing is said to a server without TLS.
        cert_file: our own certificate, where the server wants one.
        key_file: the private key of that certificate.

    Raises:
        CredentialsError: the seed is none, or a name comes without its password.
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
            raise CredentialsError("a NATS user and its password come together: one of them is missing")
        if (self.cert_file is None) != (self.key_file is None):
            raise CredentialsError("a certificate and its private key come together: one of them is missing")
        if self.seed is not None:
            _ = self.public_key

    @cached_property
    def public_key(self) -> str | None:
        """The nkey that the server knows us by."""
        try:
            return nkeys.public_key(self.seed) if self.seed is not None else None
        except nkeys.SeedError as error:
            raise CredentialsError(str(error)) from None

    @property
    def told(self) -> dict[str, str]:
        """All that is said, by name, secrets too: what another value of the same can be made of."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def inbox_prefix(self) -> str:
        """Where answers come to: our own, if the server has it so. NATS' default, for who has no name."""
        who = self.public_key or self.user or ""
        return f"_INBOX_{who}" if is_token(who) else "_INBOX"

    @property
    def said(self) -> str:
        """What is shown, in words for an error message."""
        if self.public_key is not None:
            return f"the key {self.public_key}"
        return f"the user {self.user!r} and its password" if self.user is not None else "the token"

    def sign(self, nonce: str) -> bytes:
        """The answer to a server's challenge."""
        assert self.seed is not None
        return nkeys.sign(self.seed, nonce)

    def tls(self) -> ssl.SSLContext | None:
        """How the server is known to be the right one; None where nothing is said of that.

        Raises:
            CredentialsError: a file cannot be read, or is no certificate or key.
        """
        if self.ca_file is None and self.cert_file is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # an ssl.SSLError is one
            files = ", ".join(
                name for name in (self.ca_file, self.cert_file, self.key_file) if name is not None
            )
            raise CredentialsError(f"cannot use {files} for TLS: {error.strerror or error}") from error
        return context


NOBODY: Final = Credentials()
"""For a server that asks for nothing."""
