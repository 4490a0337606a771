"""The bearer token sent to servers that require an API key. No error message repeats the key."""

from shared.errors import ClientError


def bearer(api_key: str) -> str:
    """Return the `Authorization` header for a key. Surrounding white space is removed.

    Raises:
        ClientError: the key cannot be sent in a header.
    """
    key = api_key.strip()
    if not key or not all("!" <= char <= "~" for char in key):
        raise ClientError("the API key cannot be sent: expected printable ASCII without spaces")
    return f"Bearer {key}"
