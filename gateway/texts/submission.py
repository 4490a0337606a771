"""One HTTP request with several texts, as requests on the log."""

from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request

from gateway.media.intake import MediaIntake
from gateway.openai.prompts import prompt_inputs
from gateway.requests.choices import split
from gateway.requests.parsed_request import parsed_request
from gateway.requests.response import RequestGroup
from gateway.requests.service import Gateway
from gateway.texts.batches import Batch
from gateway.texts.entries import Entry
from gateway.texts.fields import TextsRequest
from shared.events import Inputs


async def request_group(
    gateway: Gateway,
    intake: MediaIntake,
    http: Request,
    body: TextsRequest,
    batches: Sequence[Batch],
    *,
    modality: str,
    route: str,
    id_prefix: str,
    query_places: Sequence[str] = (),
) -> RequestGroup:
    """Return the requests of batches, after their images are stored.

    `modality` is the output that is asked for, `query_places` are the places of the queries in the body.

    Raises:
        ClientError: an image cannot be taken, or the chosen id is not valid.
    """
    inputs = [batch.inputs(modality) for batch in batches]
    group = _group(gateway, http, body, inputs, route, id_prefix)
    first, *others = group.requests
    images = batches[0].images
    return replace(
        group,
        requests=[*await intake.attach([first], images), *others],
        media_places=[image.where for image in images],
        text_places=[batch.text_places for batch in batches],
        query_places=query_places,
    )


def single_texts(
    gateway: Gateway,
    http: Request,
    body: TextsRequest,
    entries: Sequence[Entry],
    *,
    modality: str,
    route: str,
    id_prefix: str,
) -> RequestGroup:
    """Return a request for each text, for a model that takes one text in a request.

    Raises:
        InvalidParamError: a text is too long, or the chosen id is not valid.
    """
    inputs = [
        prompt_inputs(entry.where.partition("[")[0], entry.where, entry.text, output_modalities=[modality])
        for entry in entries
    ]
    return _group(gateway, http, body, inputs, route, id_prefix)


def _group(
    gateway: Gateway, http: Request, body: TextsRequest, inputs: list[Inputs], route: str, id_prefix: str
) -> RequestGroup:
    parsed = parsed_request(
        http,
        body,
        gateway.settings,
        id_prefix=id_prefix,
        model=body.model or gateway.served.name,
        inputs=inputs[0],
        params=body.params,
    )
    return RequestGroup(route=route, requests=split(parsed, inputs, 1))
