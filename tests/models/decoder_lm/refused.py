"""Unsupported architectures with the reasons in their errors: one list for the tests and docs/models.md."""

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Refused:
    """A `config.json` and the reason.

    Attributes:
        architecture: its name in docs/models.md, and what it is refused with; None if the reason is not the
            architecture.
        reason: a regular expression for the error.
        why: the reason in docs/models.md.
    """

    architecture: str | None
    config: dict[str, Any]
    reason: str
    why: str = ""


def _named(name: str, model_type: str, reason: str, why: str, with_: str = "", **config: Any) -> Refused:
    changes = {"architectures": [name], "model_type": model_type, **config}
    return Refused(f"`{name}`{with_}", changes, rf"{name} is not served: .*{reason}", why)


_OWN_ATTENTION: Final = "attention that does not go through transformers' interface"

REFUSED: Final = (
    _named(
        "HYV4ForCausalLM",
        "hy_v4",
        "its HYV4Indexer chooses other keys than by its own method",
        "an indexer that rotates other channels than those of the served ones",
        index_topk=8,
    ),
    _named(
        "PhimoeForCausalLM",
        "phimoe",
        "is masked by a window of 24 in transf",
        "a window that only the mask contains",
        " with a window",
        sliding_window=24,
    ),
    _named(
        "MoshiForCausalLM",
        "moshi",
        "its cache in transformers keeps a window of 24",
        "its mask and its cache disagree, so transformers' own answer depends on its cache",
        " with a window",
        sliding_window=24,
    ),
    _named(
        "MambaForCausalLM",
        "mamba",
        "it cannot be run over a packed batch",
        "its layers do not keep their state as other recurrent ones do",
        " (the first Mamba without attention)",
    ),
    _named("BloomForCausalLM", "bloom", "it cannot be run over a packed batch", _OWN_ATTENTION),
    _named("FalconForCausalLM", "falcon", r"layers \[0, 1, 2, 3\] do not go through", _OWN_ATTENTION),
    _named("GPTJForCausalLM", "gptj", "do not go through the attention interface", _OWN_ATTENTION),
    _named("DiffLlamaForCausalLM", "diffllama", "layer 0 attends twice", "a layer attends twice"),
    _named(
        "InklingForCausalLM",
        "inkling",
        "it cannot be run over a packed batch",
        "scores with a bias by position",
    ),
    _named(
        "Gemma3ForCausalLM",
        "gemma3_text",
        "layer 0 is not causal",
        "not causal",
        " with `use_bidirectional_attention`",
        use_bidirectional_attention=True,
    ),
    _named(
        "RobertaForCausalLM",
        "roberta",
        "its positions begin at 2",
        "transformers' `generate` gives it other positions than its `forward`",
        " and its descendants",
        is_decoder=True,
        pad_token_id=1,
    ),
    _named(
        "BertLMHeadModel",
        "bert",
        "does not say is_decoder: true",
        "an encoder",
        " without `is_decoder`",
        is_decoder=False,
    ),
    Refused(
        None,
        {"architectures": ["MyOwnForCausalLM"], "model_type": "my_own"},
        r"MyOwnForCausalLM \(model_type 'my_own'\) is not served: .*remote code is never run",
    ),
    Refused(
        None,
        {"architectures": ["OtherForCausalLM"]},
        r"OtherForCausalLM \(model_type 'qwen3'\) is not served",
    ),
    Refused(
        None,
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1},
        "layer 0 asks its attention for a window of 1, but its cache in transformers keeps all",
    ),
    Refused(None, {"architectures": ["Qwen3Model"]}, "Qwen3Model .* is not served"),
    Refused(None, {"architectures": ["Qwen3ForCausalLM"], "model_type": "../../evil"}, "is not served"),
    Refused(None, {"quantization_config": {"quant_method": "aqlm"}}, "quantised weights .* 'aqlm'"),
)
