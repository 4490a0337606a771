"""A checkpoint's tokenizer, and the checks of prompts that need it. No torch.

`load_tokenizer` reads the files. `PromptTokenizer` encodes texts of requests, and refuses prompts that do not
fit and token ids outside the vocabulary.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from models.checkpoints.files import CheckpointError, read_json_if_present, text_config
from models.text.token_bound import token_bound_of
from models.text.truncation import Truncation
from models.text.vocabulary_files import from_vocabulary
from shared.errors import ClientError

_SPECIAL_TOKENS: Final = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class PromptTokenizer:
    """Encodes the texts of requests for one model. Re-entrant."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_seq_len = max_seq_len
        self._bound = token_bound_of(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool, what: str = "the prompt") -> list[int]:
        """The token ids of a text. `what` names the text in error messages.

        Raises:
            ClientError: the text is not valid Unicode, or has more tokens than the model's context.
        """
        try:
            self._check_text(text)
            # `encode` holds the GIL (1.9 s for 2.4 MB, and the engine waits); the batch call does not.
            [encoded] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise ClientError(f"{what} is no valid Unicode text: it holds a lone surrogate") from error
        if len(encoded) > self._max_seq_len:  # a million ids take 15 ms, with the GIL
            raise self._too_long(str(len(encoded)))
        ids: list[int] = encoded.ids
        return ids

    def encode_cut(self, text: str, truncation: Truncation) -> list[int]:
        """The token ids of a text with its special tokens, cut to a length.

        Raises:
            ClientError: the text is not valid Unicode, or there is no room for it.
        """
        try:
            return truncation.of_text(self._tokenizer, text)
        except (TypeError, UnicodeEncodeError) as error:
            raise ClientError("the prompt is no valid Unicode text: it holds a lone surrogate") from error

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def spellings(self, words: Iterable[str | list[int]]) -> list[list[int]]:
        """The token ids of each bad word; a text is spelled both as it is and after a space.

        Raises:
            ClientError: a word has no token, or a token id is outside the vocabulary.
        """
        spellings: list[list[int]] = []
        for number, word in enumerate(words):
            where = f"bad_words[{number}]"
            if isinstance(word, str):
                found = [
                    self.encode(text, add_special_tokens=False, what=where) for text in (word, f" {word}")
                ]
                if not all(found):
                    raise ClientError(f"{where}: expected a text that has a token, found {word!r:.80}")
            else:
                self.check_ids(where, word)
                found = [word]
            spellings += [ids for ids in found if ids not in spellings]
        return spellings

    def _check_text(self, text: str) -> None:
        """Refuse a text that is certainly too long, before it is encoded: 8 MB take 15 s.

        Raises:
            ClientError: the text has more tokens than the model's context.
            UnicodeEncodeError: it is not valid Unicode.
        """
        if self._bound is not None:
            least = self._bound.least(text)
            if least > self._max_seq_len:
                raise self._too_long(f"at least {least}")

    def check_prompt(self, ids: list[int], *, new_tokens: int) -> None:
        """Check that a prompt and at least `new_tokens` further tokens fit the context.

        Raises:
            ClientError: the prompt is empty or too long, or a token id is outside the vocabulary.
        """
        if not ids:
            raise ClientError("the prompt is empty: expected at least one token")
        if len(ids) + new_tokens > self._max_seq_len:
            raise self._too_long(str(len(ids)))
        self.check_ids("the prompt", ids)

    def check_ids(self, what: str, ids: Sequence[int]) -> None:
        """Check that all token ids are in the vocabulary. `what` names them in error messages.

        Raises:
            ClientError: one is not.
        """
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = next(id for id in ids if not 0 <= id < self._vocab_size)
            raise ClientError(
                f"{what}: token id {wrong} is outside the model's vocabulary of {self._vocab_size}",
                code="invalid_token_id",
            )

    def _too_long(self, tokens: str) -> ClientError:
        return ClientError(
            f"the model's context length is {self._max_seq_len} tokens, but the prompt alone has {tokens}; "
            "shorten it",
            code="context_length_exceeded",
        )


def load_tokenizer(checkpoint: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a checkpoint, and its named special tokens (`bos_token` and so on) as text.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    config = read_json_if_present(checkpoint / "tokenizer_config.json")
    tokenizer = _read_tokenizer(checkpoint)
    names = _special_tokens(read_json_if_present(checkpoint / "special_tokens_map.json") | config)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in names.values()]
    )
    return tokenizer, names


def with_visible_tokens(tokenizer: Tokenizer, texts: Collection[str]) -> Tokenizer:
    """The tokenizer with special tokens made ordinary ones: detokenized answers then contain their texts."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not any(token.special and token.content in texts for token in added):
        return tokenizer
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in texts
    return Tokenizer.from_str(json.dumps(state))


def eos_ids_of(checkpoint: Path, tokenizer: Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """The end-of-sequence tokens: of the generation config, else of the model's, else of the tokenizer's.

    Raises:
        CheckpointError: a file is malformed.
    """
    for name in ("generation_config.json", "config.json"):
        config = read_json_if_present(checkpoint / name)
        found = config.get("eos_token_id", text_config(config).get("eos_token_id"))
        ids = found if isinstance(found, list) else [found]
        if found is not None:
            if not all(isinstance(id, int) for id in ids):
                raise CheckpointError(
                    f"{checkpoint / name}: expected an integer or integers in eos_token_id, found {found!r}"
                )
            return tuple(ids)
    own = tokenizer.token_to_id(eos_token) if eos_token is not None else None
    return () if own is None else (own,)


def vocab_size_of(checkpoint: Path, tokenizer: Tokenizer) -> int:
    """The number of rows of the embedding: the model's `vocab_size`, which may exceed the tokenizer's."""
    found = text_config(read_json_if_present(checkpoint / "config.json")).get("vocab_size")
    return found if isinstance(found, int) else int(tokenizer.get_vocab_size(with_added_tokens=True))


def _read_tokenizer(checkpoint: Path) -> Tokenizer:
    path = checkpoint / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else from_vocabulary(checkpoint)
    except Exception as error:  # tokenizers raises plain Exception
        named = path if path.is_file() else checkpoint / "vocab.json"
        raise CheckpointError(f"{named} cannot be read: {error}") from error
    if tokenizer is None:
        raise CheckpointError(
            f"{checkpoint} has no tokenizer.json; make one with "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens, as text."""
    found = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}
