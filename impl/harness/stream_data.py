"""Documents streamed from parquet or jsonl files or a Hugging Face dataset, tokenised and packed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from impl.errors import ConfigError
from impl.harness.tokens import Tokenizer, one_line

HELDOUT_BYTE = 26
"""A document is held out if the first byte of its SHA-256 is below this: one in ten, whatever the shards and order."""


class PackedStream:
    """Documents packed into sequences (see :class:`impl.harness.data.TokenStream`).

    Documents follow each other with the tokenizer's end token between them, cut every ``sequence + 1`` tokens; what is
    left over starts the next batch.  Every DP rank reads its own part of the dataset (whole files if their number is a
    multiple of the DP size, else every dp-th document) in the dataset's order, again from its beginning when it ends.
    The seed changes nothing here: shuffled data cannot be resumed exactly.

    open_part: returns the ``IterableDataset`` of DP rank ``rank`` of ``dp``.
    rows: sequences of a batch on this rank.
    """

    def __init__(
        self,
        open_part: Callable[[int, int], Any],
        tokenizer: Tokenizer,
        source: str,
        text_field: str,
        *,
        sequence: int,
        rows: int,
        dp_rank: int,
        dp: int,
        heldout_sequences: int,
    ) -> None:
        self._open, self._part = open_part, (dp_rank, dp)
        self._tokenizer, self._source, self._field = tokenizer, source, text_field
        self._length, self._rows = sequence + 1, rows
        self._heldout = self._pack_heldout(heldout_sequences)
        self._next_step, self._epoch = 1, 0
        self._remainder: list[int] = []
        self._dataset = open_part(dp_rank, dp)
        self._texts: Iterator[bytes] | None = None
        self._start: dict[str, Any] | None = None

    def batch(self, step: int) -> Tensor:
        """Return the next ``[rows, sequence + 1]`` int64 sequences; steps must be asked for in order, from 1."""
        if step != self._next_step:
            raise ValueError(f"a stream is read in order: step {self._next_step} is next, not {step}")
        need = self._rows * self._length
        while len(self._remainder) < need:
            if self._texts is None:  # not sooner: until it is read, the dataset does not know its own place
                self._texts = self._training_texts()
            self._remainder += [*self._tokenizer.encode(next(self._texts)), self._tokenizer.end]
        tokens, self._remainder = self._remainder[:need], self._remainder[need:]
        self._next_step += 1
        return torch.tensor(tokens, dtype=torch.int64).view(self._rows, self._length)

    def heldout(self) -> Tensor:
        """Return the held-out sequences, ``[heldout_sequences, sequence + 1]`` int64; the same on every rank."""
        return self._heldout

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's place in its part of the dataset as plain JSON data."""
        return {
            "next_step": self._next_step,
            "epoch": self._epoch,
            "remainder": list(self._remainder),
            "dataset": self._start if self._texts is None else self._dataset.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to the place of :meth:`state_dict`."""
        self._next_step, self._epoch = state["next_step"], state["epoch"]
        self._remainder, self._texts = list(state["remainder"]), None
        self._dataset, self._start = self._open(*self._part), state["dataset"]
        if self._start is not None:
            self._dataset.load_state_dict(self._start)

    def _training_texts(self) -> Iterator[bytes]:
        resumed = True  # an epoch that was resumed near its end may hold nothing more
        while True:
            found = False
            for text in self._read(self._dataset):
                if not is_heldout(text):
                    found = True
                    yield text
            if not found and not resumed:
                raise ConfigError(
                    f"data source {self._source!r} has no training document for DP rank {self._part[0]} of "
                    f"{self._part[1]}: use fewer DP ranks or more documents"
                )
            resumed = False
            self._epoch += 1
            self._dataset = self._open(*self._part)  # a resumed dataset would start again in its middle

    def _pack_heldout(self, sequences: int) -> Tensor:
        tokens: list[int] = []
        need, documents = sequences * self._length, 0
        for text in self._read(self._open(0, 1)):
            documents += 1
            if is_heldout(text):
                tokens += [*self._tokenizer.encode(text), self._tokenizer.end]
            if len(tokens) >= need:
                return torch.tensor(tokens[:need], dtype=torch.int64).view(sequences, self._length)
        if not documents:
            raise ConfigError(f"data source {self._source!r} has no documents")
        raise ConfigError(
            f"data source {self._source!r} is too short: the held-out tenth of its {documents} documents has "
            f"{len(tokens) // self._length} sequences of {self._length - 1} tokens; data.heldout_sequences asks for "
            f"{sequences}"
        )

    def _read(self, dataset: Any) -> Iterator[bytes]:
        """Yield the non-empty texts of ``dataset``; errors of files and formats become :class:`ConfigError`."""
        try:
            for example in dataset:
                text = example.get(self._field)
                if not isinstance(text, str):
                    columns = ", ".join(map(repr, example))
                    raise ConfigError(
                        f"data source {self._source!r} has no text in {self._field!r}: set data.text_field to one of "
                        f"{columns}"
                    )
                if text:
                    yield text.encode("utf-8", errors="replace")
        except ConfigError:
            raise
        except Exception as error:  # datasets, fsspec and pyarrow raise their own types, bare Exception among them
            raise ConfigError(f"cannot read data source {self._source!r}: {one_line(error)}") from None


def is_heldout(text: bytes) -> bool:
    """Return whether the document ``text`` belongs to the held-out tenth."""
    return hashlib.sha256(text).digest()[0] < HELDOUT_BYTE
