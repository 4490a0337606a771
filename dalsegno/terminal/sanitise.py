"""Sanitising of text from outside, before it is shown on a terminal or written to a log line.

Clients choose ids, model names and reasons, and operators see them. Such text must not control the terminal
or look like a separate log line.
"""


def plain(text: str) -> str:
    """Return `text` with every character that is not printable escaped, as in a Python string literal."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
