"""Record what the published code of Qwen3-TTS computes on the tiny checkpoint, to `published.npz`.

    python -m tests.models.qwen3_tts.record_published write /tmp/folder        here
    python -m tests.models.qwen3_tts.record_published record /tmp/folder       in an environment with qwen-tts

The second one: `qwen-tts==0.1.1` without its dependencies, `transformers==4.57.3`, and torch. `sox` and
`torchaudio`, which only the 25 Hz tokenizer needs, are replaced by empty modules.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.models.qwen3_tts.cases import CASES, FRAMES, HEARD, PUBLISHED


def main() -> None:
    """Write the checkpoint, or record what is said of it."""
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "write":
        folder.mkdir(parents=True)
        import_module("tests.tiny.qwen3_tts").write_qwen3_tts(folder)
        return
    _stub("sox", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")
    torch.set_num_threads(1)
    recorded = record(folder)
    np.savez_compressed(PUBLISHED, allow_pickle=False, **recorded)
    print(PUBLISHED.stat().st_size, "bytes")


def record(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Codes of all cases, and the sound of one, decoded eight frames at a time."""
    core: Any = import_module("qwen_tts.core.models")
    v2: Any = import_module("qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2")
    settings: Any = import_module("qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2")
    auto: Any = import_module("transformers").PreTrainedTokenizerFast.from_pretrained(folder)
    load_file: Any = import_module("safetensors.torch").load_file
    json: Any = import_module("json")

    model = core.Qwen3TTSForConditionalGeneration(core.Qwen3TTSConfig.from_pretrained(folder)).eval()
    print(model.load_state_dict(load_file(folder / "model.safetensors"), strict=True))
    raw = json.loads((folder / "speech_tokenizer/config.json").read_text())
    decoder = v2.Qwen3TTSTokenizerV2Decoder(
        settings.Qwen3TTSTokenizerV2DecoderConfig(**raw["decoder_config"])
    ).eval()
    weights = load_file(folder / "speech_tokenizer/model.safetensors")
    own = {name.removeprefix("decoder."): tensor for name, tensor in weights.items()}
    print(decoder.load_state_dict(own, strict=True))

    def ids(text: str) -> torch.Tensor:
        return torch.tensor([auto(text)["input_ids"]])

    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, case in CASES.items():
        told = case.get("instructions")
        codes, _ = model.generate(
            input_ids=[ids(f"<|im_start|>assistant\n{case['text']}<|im_end|>\n<|im_start|>assistant\n")],
            instruct_ids=[ids(f"<|im_start|>user\n{told}<|im_end|>\n") if told else None],
            languages=[case["language"]],
            speakers=[case["speaker"]],
            non_streaming_mode=True,
            max_new_tokens=FRAMES + 1,
            do_sample=False,
            subtalker_dosample=False,
        )
        print(name, len(codes[0]), codes[0][:, 0].tolist())
        found[f"{name}.codes"] = codes[0].numpy().astype(np.int32)
        if name == HEARD:
            with torch.inference_mode():
                sound = decoder.chunked_decode(codes[0].T[None], chunk_size=8, left_context_size=25)[0, 0]
            found["sound"] = sound.numpy()
    return found


def _stub(*names: str) -> None:
    for name in names:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


if __name__ == "__main__":
    main()
