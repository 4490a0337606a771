"""Unsupported architectures with the reasons in their errors: one list for the tests and docs/models.md."""

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Refused:
    """A `config.json` and the reason, as a regular expression.

    Attributes:
        architecture: its name in docs/models.md; None if the reason is not the architecture.
    """

    architecture: str | None
    config: dict[str, Any]
    reason: str


def _named(name: str, model_type: str, reason: str, **config: Any) -> Refused:
    changes = {"architectures": [name], "model_type": model_type, **config}
    return Refused(name, changes, rf"{name} is not served: .*{reason}")


REFUSED: Final = (
    _named("DeepseekV32ForCausalLM", "deepseek_v32", "layer 0 needs indices", index_topk=8),
    _named("GlmMoeDsaForCausalLM", "glm_moe_dsa", "layer 0 needs indices"),
    _named("PhimoeForCausalLM", "phimoe", "is masked by a window of 24 in transf", sliding_window=24),
    _named("MoshiForCausalLM", "moshi", "its cache in transformers keeps a window of 24", sliding_window=24),
    _named("MambaForCausalLM", "mamba", "it cannot be run over a packed batch"),
    _named("BloomForCausalLM", "bloom", "it cannot be run over a packed batch"),
    _named("FalconForCausalLM", "falcon", r"layers \[0, 1, 2, 3\] do not go through"),
    _named("GPTJForCausalLM", "gptj", "do not go through the attention interface"),
    _named("DiffLlamaForCausalLM", "diffllama", "layer 0 attends twice"),
    _named("InklingForCausalLM", "inkling", "it cannot be run over a packed batch"),
    _named("Gemma3ForCausalLM", "gemma3_text", "layer 0 is not causal", use_bidirectional_attention=True),
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
    Refused(None, {"quantization_config": {"quant_method": "gptq"}}, "quantised weights .* 'gptq'"),
)
