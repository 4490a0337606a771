"""The demo model's tokenizer and chat template, and the encoding of lessons as token ids.

The tokenizer is a byte-level BPE and the template is ChatML, as in the Qwen family, but smaller. Independent
of the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from configs.demo.conversations import Conversation

VOCABULARY: Final = 1280
END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"

CHAT_TEMPLATE: Final = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these functions:\\n' }}
    {%- for tool in tools %}
        {{- tool.function | tojson + '\\n' }}
    {%- endfor %}
    {{- 'A call is written so:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
            {{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>\\n' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(lessons: Iterable[Conversation]) -> Tokenizer:
    """Train a byte-level BPE of `VOCABULARY` entries on `lessons`. It can encode any UTF-8."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in (END_OF_TEXT, TURN_START, TURN_END)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for lesson in lessons for turn in lesson.turns for text in (turn.question, turn.answer))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and a mask of those that belong to an answer, which the model learns."""

    ids: tuple[int, ...]
    answered: tuple[bool, ...]


def encode(tokenizer: Tokenizer, lesson: Conversation) -> Example:
    """Encode a lesson as a server does: with the template, or as plain text."""
    ids: list[int] = []
    answered: list[bool] = []

    def add(text: str, *, answer: bool) -> None:
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids.extend(piece)
        answered.extend([answer] * len(piece))

    if lesson.system is not None:
        add(f"{TURN_START}system\n{lesson.system}{TURN_END}\n", answer=False)
    for turn in lesson.turns:
        if lesson.raw:
            add(turn.question, answer=False)
            add(f" {turn.answer}{END_OF_TEXT}", answer=True)
        else:
            add(f"{TURN_START}user\n{turn.question}{TURN_END}\n{TURN_START}assistant\n", answer=False)
            add(f"{turn.answer}{TURN_END}", answer=True)
            add("\n", answer=False)
    return Example(tuple(ids), tuple(answered))
