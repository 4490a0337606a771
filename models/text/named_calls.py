r"""Tool calls that name a function in front of its arguments. Pure.

    deepseek (V3, R1)
        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "Ulm"}\n```
        <｜tool▁call▁end｜><｜tool▁calls▁end｜>
    deepseek_v3_1
        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "Ulm"}<｜tool▁call▁end｜>
        <｜tool▁calls▁end｜>
    mistral_args (Mistral Small 3.2, Ministral 3)
        [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": "Ulm"}
    harmony (gpt-oss)
        <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "Ulm"}
    gemma (Gemma 4)
        <|tool_call>call:f{a:<|"|>Ulm<|"|>}<tool_call|>
    functiongemma
        <start_function_call>call:f{a:<escape>Ulm<escape>}<end_function_call>

The arguments are JSON; those of Gemma have a syntax of their own (`models.text.gemma_arguments`).
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What surrounds the name and the arguments of a call.

    Attributes:
        opens_name: the text before the name.
        closes_name: the text between the name and the arguments.
        ends_name: its last part, by which it is found: a model may write other text before that.
        closes_arguments: the text after the arguments.
        quote: the mark around strings, where the arguments have Gemma's syntax; empty for JSON.
    """

    opens_name: str = ""
    closes_name: str = ""
    ends_name: str = ""
    closes_arguments: str = ""
    quote: str = ""


DEEPSEEK: Final = Named(
    opens_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    closes_name="\n```json\n",
    ends_name="```json",
    closes_arguments="\n```<｜tool▁call▁end｜>",
)
DEEPSEEK_V3_1: Final = Named(
    opens_name="<｜tool▁call▁begin｜>",
    closes_name="<｜tool▁sep｜>",
    ends_name="<｜tool▁sep｜>",
    closes_arguments="<｜tool▁call▁end｜>",
)
MISTRAL_ARGS: Final = Named(closes_name="[ARGS]", ends_name="[ARGS]")
HARMONY: Final = Named(closes_name=" <|constrain|>json<|message|>", ends_name="<|message|>")
GEMMA: Final = Named(opens_name="call:", quote='<|"|>')
FUNCTION_GEMMA: Final = Named(opens_name="call:", quote="<escape>")
