"""Text that others wrote, made fit for a terminal and for one line of a log.

Clients choose ids, model names and reasons; what they chose is shown to operators. It must not be able to
steer their terminal, or to look like a line of its own.
"""


def plain(text: str) -> str:
    """`text` with everything that is not printed escaped, as Python writes it."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
