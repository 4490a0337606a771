"""What a client shows to a server that takes no one without a key. No error repeats the key."""

from shared.errors import ClientError


def bearer(api_key: str) -> str:
    """The `Authorization` header for a key. White space around it is none of it: files end with a newline.

    Raises:
        ClientError: no header can hold it.
    """
    key = api_key.strip()
    if not key or not all("!" <= char <= "~" for char in key):
        raise ClientError("the API key cannot be sent: expected printable ASCII without spaces")
    return f"Bearer {key}"
