"""The CPU nodes of Qwen3-ASR: its prompt by the checkpoint's template, features of windows, and its answer.

The answer is `language English<asr_text>Hello.`. A language that is known stands in the prompt, and the
answer is the text.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from models.base import MediaReader
from models.checkpoints.files import CheckpointError, read_json_if_present
from models.qwen3_asr.graph import Qwen3AsrOptions
from models.qwen3_asr.settings import LANGUAGES, Qwen3AsrSettings, code_of
from models.speech_to_text.extractors import read_extractor
from models.speech_to_text.hearing_processing import HearingProcessing
from models.speech_to_text.mel import RATE
from models.speech_to_text.window_processing import Spoken
from models.text.chat_template import ChatTemplate, find_template
from models.text.tokenizer import PromptTokenizer, load_tokenizer
from models.vision_language.expansion import placeholders_in

if TYPE_CHECKING:
    import numpy.typing as npt

_FORCED: Final = "language {name}<asr_text>"


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader) -> "Qwen3AsrProcessing":
    """Read the settings, the tokenizer and the template of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
        ChatTemplateError: the template is no valid Jinja.
    """
    from transformers import Qwen3ASRFeatureExtractor  # noqa: PLC0415 - heavy: it imports torch

    extractor = read_extractor(Qwen3ASRFeatureExtractor, checkpoint)
    if extractor.sampling_rate != RATE:
        raise CheckpointError(
            f"{checkpoint}: expected sound of {RATE} samples per second, found {extractor.sampling_rate} in "
            "the settings of its features"
        )
    return Qwen3AsrProcessing(checkpoint, extractor, max_seq_len, media)


class Qwen3AsrProcessing(HearingProcessing):
    """The CPU nodes of one checkpoint.

    Args:
        checkpoint: the folder.
        extractor: transformers' `Qwen3ASRFeatureExtractor`.
        max_seq_len: the most tokens of a sequence.
        media: reads the file.
    """

    def __init__(self, checkpoint: Path, extractor: Any, max_seq_len: int, media: MediaReader) -> None:
        self._settings: Final = Qwen3AsrSettings.read(checkpoint)
        self._extractor = extractor
        tokenizer, names = load_tokenizer(checkpoint)
        super().__init__(tokenizer, self._settings.ends, Qwen3AsrOptions, max_seq_len, media)
        self._prompts = PromptTokenizer(
            tokenizer, vocab_size=self._settings.vocab_size, max_seq_len=max_seq_len
        )
        found = find_template(checkpoint, read_json_if_present(checkpoint / "tokenizer_config.json"))
        place = tokenizer.id_to_token(self._settings.place)
        if found is None or place is None:
            raise CheckpointError(
                f"{checkpoint}: expected a chat template, and the token {self._settings.place} for sound "
                "(audio_token_id) in tokenizer.json; use the files that were published with the weights"
            )
        self._template, self._place = ChatTemplate(found[0], names, origin=found[1]), place

    def rows(self, samples: int) -> int:
        frames = max(samples, self._extractor.min_length) // self._extractor.hop_length
        return self._settings.rows(frames)

    def prompt(self, options: Qwen3AsrOptions) -> list[int]:
        code = code_of(options.language)
        messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "audio", "audio": ""}]}]
        if options.prompt:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": options.prompt}]})
        text = self._template.render(messages)
        placeholders_in(text, {"audio": self._place}, ["audio"])
        if code is not None:
            text += _FORCED.format(name=LANGUAGES[code])
        return self._prompts.encode(text, add_special_tokens=False)

    def heard(self, sound: "npt.NDArray[np.float32]") -> "npt.NDArray[np.float32]":
        # Without the padding to whole chunks, which the encoder adds itself.
        found = self._extractor(sound, sampling_rate=RATE, padding=True, n_window=0, return_tensors="np")
        return np.asarray(found.input_features[0], np.float32)

    def spoken(self, options: Qwen3AsrOptions, tokens: list[int]) -> Spoken:
        from transformers import Qwen3ASRProcessor  # noqa: PLC0415 - heavy: it imports torch

        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        found = Qwen3ASRProcessor.parse_output(self, text)
        code = code_of(options.language)
        name = LANGUAGES[code] if code is not None else found["language"] or ""
        codes = {name.lower(): code for code, name in LANGUAGES.items()}
        name = name.lower()
        return Spoken(text=found["transcription"], language=codes.get(name, ""), language_name=name)
