"""`dalsegno ask`: sends one question to a running server and prints the answer."""

from typing import Final

DEFAULT_URL: Final = "http://127.0.0.1:8000"
"""The server that commands ask unless another one is named."""
