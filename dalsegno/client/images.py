"""Requests for an image: what `generate_image` and `edit_image` add to a request, and what they return."""

from dalsegno.client.answer import Answer
from dalsegno.client.media import Medium
from dalsegno.client.request import RequestOptions
from shared.errors import ClientError
from shared.picture_size import sides_of


def image_request(how: RequestOptions, size: str | None) -> RequestOptions:
    """Return the arguments of a request for an image of this size, `WIDTHxHEIGHT` in pixels.

    Raises:
        ClientError: `size` is something else.
    """
    wanted = how.copy()
    wanted.setdefault("output_modalities", ("image",))
    if size is None:
        return wanted
    sides = sides_of(size)
    if sides is None:
        wrong = ClientError(
            f"size: expected WIDTHxHEIGHT such as 1024x1024, found {size!r}", code="invalid_value"
        )
        wrong.param = "size"
        raise wrong
    width, height = sides
    wanted["options"] = {**how.get("options", {}), "width": width, "height": height}
    return wanted


def image_of(answer: Answer) -> Medium:
    """Return the image of an answer, the last one if there are several.

    Raises:
        ClientError: there is none.
    """
    if not answer.images:
        raise ClientError("the answer has no image: the model drew none", code="no_image")
    return answer.images[-1]
