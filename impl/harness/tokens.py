"""From text to token ids: bytes, or a ``transformers`` tokenizer."""

from __future__ import annotations

from typing import Any, Protocol

from impl.errors import ConfigError


class Tokenizer(Protocol):
    """What the loaders ask of a tokenizer.

    vocabulary: every id is below it.
    end: the id that separates documents.
    """

    vocabulary: int
    end: int

    def encode(self, text: bytes) -> list[int]:
        """Return the ids of UTF-8 ``text``, without special tokens; raises ``UnicodeDecodeError``."""
        ...


class ByteTokenizer:
    """Every byte is a token; documents are separated by a NUL byte, which text does not contain."""

    vocabulary = 256
    end = 0

    def encode(self, text: bytes) -> list[int]:
        """Return the bytes of ``text``."""
        return list(text)


class PretrainedTokenizer:
    """A ``transformers`` tokenizer; its end-of-sequence token separates documents."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"tokenizer {name!r} has no end-of-sequence token to put between documents")
        self._tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        self.end = int(tokenizer.eos_token_id)

    def encode(self, text: bytes) -> list[int]:
        """Return the ids of ``text``."""
        return self._tokenizer(text.decode("utf-8"), add_special_tokens=False, verbose=False)["input_ids"]


def load_tokenizer(name: str, vocabulary: int) -> Tokenizer:
    """Return the tokenizer ``bytes``, or the one of a local folder or a Hugging Face name, for a model's vocabulary.

    Code that comes with a tokenizer is never run.  Raises :class:`ConfigError` if it cannot be loaded or has more
    tokens than the model's ``vocabulary``.
    """
    tokenizer = ByteTokenizer() if name == "bytes" else _pretrained(name)
    if tokenizer.vocabulary > vocabulary:
        raise ConfigError(
            f"tokenizer {name!r} has {tokenizer.vocabulary} tokens but the model's vocabulary is {vocabulary}: "
            "choose a smaller tokenizer or another model"
        )
    return tokenizer


def _pretrained(name: str) -> PretrainedTokenizer:
    from huggingface_hub.utils import logging  # slow to import, and not needed for bytes
    from transformers import AutoTokenizer

    logging.set_verbosity_error()  # each of its retries would be a warning
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise a dozen types, bare Exception among them
        raise ConfigError(
            f"cannot load tokenizer {name!r} (a folder, a Hugging Face name or 'bytes'): {one_line(error)}"
        ) from None
    return PretrainedTokenizer(name, tokenizer)


def one_line(error: BaseException, limit: int = 240) -> str:
    """Return the error's message as one line of at most ``limit`` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
