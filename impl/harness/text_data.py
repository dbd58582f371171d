"""Running text, held in memory as tokens and read at random: the embedded text and local text files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from impl.errors import ConfigError
from impl.harness.tokens import Tokenizer, one_line

EMBEDDED_SHA256 = "8cdfec43b5d0bf63d40fe9ceec93cb4b5ee133f6e13608b2f2d87932e54af0e9"
HELDOUT_PART = 0.1
"""The last part of the text, which is never trained on."""


def embedded_text() -> bytes:
    """Return the text of ``impl/data/corpus.txt``; raises :class:`ConfigError` if the file has changed."""
    try:
        text = (resources.files("impl") / "data" / "corpus.txt").read_bytes()
    except OSError as error:
        raise ConfigError(f"the embedded text is missing from this installation: {error}") from None
    if hashlib.sha256(text).hexdigest() != EMBEDDED_SHA256:
        raise ConfigError("the embedded text impl/data/corpus.txt was changed: restore it, or name another data.source")
    return text


def read_files(paths: Iterable[Path]) -> list[bytes]:
    """Return the contents of ``paths``; raises :class:`ConfigError`."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read data file {path}: {error.strerror}") from None
    return texts


def tokenize(texts: Iterable[bytes], tokenizer: Tokenizer, source: str) -> Tensor:
    """Return the ids of all texts, ``[n]``, with the tokenizer's end token between them.  Raises ConfigError."""
    dtype = torch.uint8 if tokenizer.vocabulary <= 256 else torch.int32
    end = torch.tensor([tokenizer.end], dtype=dtype)
    parts: list[Tensor] = []
    for text in texts:
        try:
            ids = torch.tensor(tokenizer.encode(text), dtype=dtype)
        except UnicodeDecodeError as error:
            raise ConfigError(f"data source {source!r} is not UTF-8 text: {one_line(error)}") from None
        parts += [end, ids] if parts else [ids]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


class TextStream:
    """Windows at random places of a text (see :class:`impl.harness.data.TokenStream`).

    The sequences of a step depend on ``seed`` and the step alone, and DP rank r takes the r-th contiguous part of them:
    the data are the same under every DP size, and there is no state to save.  The last tenth of the text is held out;
    the held-out set is spread evenly over it, without overlap, and does not depend on the seed.
    """

    def __init__(
        self,
        tokens: Tensor,
        source: str,
        *,
        sequence: int,
        batch: int,
        dp_rank: int,
        dp: int,
        seed: int,
        heldout_sequences: int,
    ) -> None:
        cut = len(tokens) - int(len(tokens) * HELDOUT_PART)
        self._train, rest = tokens[:cut], tokens[cut:]
        self._length, self._seed = sequence + 1, seed
        share = batch // dp
        self._rows = range(dp_rank * share, (dp_rank + 1) * share)
        if len(tokens) == 0:
            raise ConfigError(f"data source {source!r} is empty")
        available = len(rest) // self._length
        if available < heldout_sequences or len(self._train) < self._length:
            raise ConfigError(
                f"data source {source!r} is too short: {len(tokens)} tokens, of which the last {len(rest)}, held out, "
                f"hold {available} sequences of {sequence}; data.heldout_sequences asks for {heldout_sequences}"
            )
        stride = len(rest) // heldout_sequences
        self._heldout = torch.stack([rest[i * stride :][: self._length] for i in range(heldout_sequences)]).long()

    def batch(self, step: int) -> Tensor:
        """Return this rank's sequences of 1-based ``step``, ``[batch / dp, sequence + 1]`` int64."""
        places = len(self._train) - self._length + 1
        starts = [_draw(self._seed, step, row) % places for row in self._rows]
        return torch.stack([self._train[s : s + self._length] for s in starts]).long()

    def heldout(self) -> Tensor:
        """Return the held-out sequences, ``[heldout_sequences, sequence + 1]`` int64; the same on every rank."""
        return self._heldout

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: a step's data follow from its number."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept the empty state."""
        if state:
            raise ValueError(f"text has no state to resume, got {sorted(state)}")


def _draw(seed: int, step: int, row: int) -> int:
    """Return a 64-bit number that is the same with every library version."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {row}".encode()).digest()[:8], "little")
