"""Requests for a video: what `generate_video` adds to a request, and what it returns."""

from dalsegno.client.answer import Answer
from dalsegno.client.images import image_request
from dalsegno.client.media import Medium
from dalsegno.client.request import RequestOptions
from shared.errors import ClientError


def video_request(how: RequestOptions, size: str | None, seconds: float | None) -> RequestOptions:
    """Return the arguments of a request for a video of this size, `WIDTHxHEIGHT` in pixels, and length.

    Raises:
        ClientError: `size` is something else.
    """
    wanted = how.copy()
    wanted.setdefault("output_modalities", ("video",))
    if seconds is not None:
        wanted["options"] = {**how.get("options", {}), "seconds": seconds}
    return image_request(wanted, size)


def video_of(answer: Answer) -> Medium:
    """Return the video of an answer, the last one if there are several.

    Raises:
        ClientError: there is none.
    """
    videos = answer.media.get("video")
    if not videos:
        raise ClientError("the answer has no video: the model made none", code="no_video")
    return videos[-1]
