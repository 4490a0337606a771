"""Raw prompts as OpenAI writes them: a text, token ids, or a list of either."""

from typing import Any

import msgspec

from gateway.errors import InvalidParamError
from shared.events import Inputs
from shared.validation_errors import described, validation_problem


def prompt_list(name: str, found: object) -> list[tuple[str, Any]]:
    """The prompts in the field `name`, each with its place in errors.

    Raises:
        InvalidParamError: the field is neither a prompt nor a list of prompts.
    """
    match found:
        case str() | [int(), *_]:
            return [(name, found)]
        case [str(), *_] | [[*_], *_]:
            assert isinstance(found, list)
            return [(f"{name}[{number}]", one) for number, one in enumerate(found)]
        case _:
            raise InvalidParamError(
                name,
                f"{name}: expected a string, an array of token ids, or an array of either, "
                f"found {described(found)}",
            )


def prompt_inputs(name: str, where: str, prompt: str | list[Any], **fields: Any) -> Inputs:
    """The inputs of one prompt in the field `name`; `where` is its place, `fields` are further inputs.

    Raises:
        InvalidParamError: a token id is wrong, or the text is too long.
    """
    key = "text" if isinstance(prompt, str) else "token_ids"
    given = {key: prompt, "chat": False, **fields}
    try:
        return msgspec.convert(given, Inputs)
    except msgspec.ValidationError as error:
        wrong = validation_problem(error, given, Inputs)
        raise InvalidParamError(name, f"{wrong.place.replace(key, where, 1)}: {wrong.problem}") from error
