"""OpenAI's words for a request that does not fit the model's context.

Client libraries recognise "This model's maximum context length is". The failure on the log keeps its own
words: a replay compares them.
"""

import re
from typing import Final

CODE: Final = "context_length_exceeded"
_FAILURE: Final = re.compile(
    r"(?P<what>the model's context length|the size of the KV cache) is (?P<limit>\d+) tokens, but (?:"
    r"(?P<wanted>\d+) were requested \((?P<prompt>\d+) in the prompt, (?P<answer>\d+) for the answer\)"
    r"|the prompt alone has (?P<alone>[^;]+))"
)


def in_openais_words(code: str, message: str) -> str:
    """The message of a failure; of a context overflow, as OpenAI writes it."""
    found = _FAILURE.match(message) if code == CODE else None
    if found is None:
        return message
    where = " here, the size of the KV cache" if "KV" in found["what"] else ""
    limit = f"This model's maximum context length is {found['limit']} tokens{where}. However, "
    if found["alone"] is not None:
        return f"{limit}your messages resulted in {found['alone']} tokens. Please reduce their length."
    return (
        f"{limit}you requested {found['wanted']} tokens ({found['prompt']} in the messages, "
        f"{found['answer']} in the completion). Please reduce the length of the messages or completion."
    )
