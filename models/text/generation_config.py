"""`generation_config.json` of a checkpoint: which of its settings are applied, and which are reported.

Every field of transformers' `GenerationConfig` is in one of the tables, which a test compares with that
class. No torch.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from models.checkpoints.files import read_json_if_present

FILE: Final = "generation_config.json"

APPLIED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "min_new_tokens": "min_tokens",
        "bad_words_ids": "bad_words",
        "stop_strings": "stop",
        "exponential_decay_length_penalty": "length_decay",
    }
)
"""Settings that are the defaults of requests, with their names in `sampling_defaults.Defaults`."""

READ: Final = frozenset(
    {"do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"}
)
"""Settings that are read elsewhere: what ends and begins texts, and whether tokens are drawn."""

UNAPPLIED: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "begin_suppress_tokens": None,
        "constraints": None,
        "diversity_penalty": 0.0,
        "dola_layers": None,
        "encoder_no_repeat_ngram_size": 0,
        "encoder_repetition_penalty": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "force_words_ids": None,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "guidance_scale": 1.0,
        "max_length": 20,
        "max_new_tokens": None,
        "max_time": None,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "num_beam_groups": 1,
        "num_return_sequences": 1,
        "penalty_alpha": 0.0,
        "sequence_bias": None,
        "suppress_tokens": None,
        "token_healing": False,
        "top_h": None,
        "typical_p": 1.0,
        "watermarking_config": None,
    }
)
"""Settings that would change the answer and are not applied, with their neutral values."""

HARMLESS: Final = frozenset(
    {
        # How transformers computes the same answer.
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "continuous_batching_config",
        "disable_compile",
        "is_assistant",
        "low_memory",
        "max_cache_len",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "remove_invalid_values",
        "renormalize_logits",
        "speculation_type",
        "target_lookbehind",
        "use_cache",
        "use_mtp",
        # What it returns beside the answer.
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "return_dict_in_generate",
        # They matter with several beams only.
        "early_stopping",
        "length_penalty",
        "transformers_version",
    }
)
"""Settings that change no answer of a server that draws one token after the other."""

_LIMITS: Final = frozenset({"max_length", "max_new_tokens"})
"""Limits of an answer: a request states its own, or it may be as long as the context allows."""


def remarks_of(checkpoint: Path) -> list[str]:
    """Say which settings of a checkpoint change transformers' answers and not those given here.

    Raises:
        CheckpointError: the file is malformed.
    """
    config = read_json_if_present(checkpoint / FILE)
    asked = {
        name: config[name]
        for name, neutral in UNAPPLIED.items()
        if name not in _LIMITS and config.get(name) not in (None, neutral, [], {})
    }
    if not asked:
        return []
    listed = ", ".join(f"{name}={value!r}" for name, value in asked.items())
    return [f"{FILE} asks for what is not applied, so answers may differ from transformers': {listed:.300}"]
