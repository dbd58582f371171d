"""A table of measured kernel times: a CSV file of one device and one torch version, a row per kernel.

A kernel is found by its name, its key (what else decides its time, as text), its size where it has one, and how many
processes were busy at the same time.  Times are those of the slowest process.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from impl.errors import ConfigError
from impl.harness.record import write_atomically
from impl.harness.tiers import canonical_digest
from impl.optimizers.base import Optimizer, Shape
from impl.projection.machine import Block

Identity = tuple[str, str, int, int]
"""Kernel, key, size, processes."""


@dataclass(frozen=True)
class Row:
    """How long one kernel takes.

    size: elements of ``apply``, ``norm`` and elementwise updates, bytes of copies and collectives; 0 if it has none.
    processes: busy with the same at the same time.
    seconds, q25, q75: median and quartiles of ``n`` samples; NaN with ``n`` 0 where it was not measured.
    spike: seconds of the slowest step of a refresh period, where ``seconds`` is the mean over a period; else NaN.
    backend: ``cpu`` or ``cuda``.  device: as the driver names it.  threads: of a process.
    cores: that all processes share, 0 where each has a GPU.
    commit, date: of the code and the measurement.  note: why there is no time.
    """

    kernel: str
    key: str
    size: int
    processes: int
    seconds: float
    q25: float
    q75: float
    n: int
    spike: float
    backend: str
    device: str
    dtype: str
    torch: str
    threads: int
    cores: int
    commit: str
    date: str
    note: str = ""

    @property
    def identity(self) -> Identity:
        """What it is found by."""
        return self.kernel, self.key, self.size, self.processes

    @property
    def place(self) -> tuple[str, str, str, int]:
        """Where it was measured: backend, device, torch version and threads."""
        return self.backend, self.device, self.torch, self.threads


COLUMNS = {field.name: field.type for field in dataclasses.fields(Row)}
_TYPES = {"str": str, "int": int, "float": float}


@dataclass(frozen=True)
class Table:
    """Rows of one device, sorted by identity.  source: the file's name, for evidence; path: to it, for advice."""

    rows: tuple[Row, ...]
    source: str = ""
    path: str = ""

    @property
    def device(self) -> str:
        """The device that was measured; empty for an empty table."""
        return self.rows[0].device if self.rows else ""

    @property
    def backend(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.rows[0].backend if self.rows else ""

    @property
    def cores(self) -> int | None:
        """The cores that all processes share, None where each has a device of its own."""
        return (self.rows[0].cores or None) if self.rows else None

    @cached_property
    def _measured(self) -> dict[Identity, Row]:
        return {row.identity: row for row in self.rows if row.n > 0}

    def find(self, kernel: str, key: str, processes: int, size: int = 0) -> Row | None:
        """Return the measured row of exactly this kernel, None if there is none."""
        return self._measured.get((kernel, key, size, processes))

    def sizes(self, kernel: str, key: str, processes: int) -> list[Row]:
        """Return the measured rows of a kernel that has sizes, by rising size."""
        return self._by_size.get((kernel, key, processes), [])

    @cached_property
    def _by_size(self) -> dict[tuple[str, str, int], list[Row]]:
        found: dict[tuple[str, str, int], list[Row]] = {}
        for row in sorted(self._measured.values(), key=lambda row: row.size):
            found.setdefault((row.kernel, row.key, row.processes), []).append(row)
        return found

    def processes(self) -> list[int]:
        """Return the numbers of busy processes that something was measured with."""
        return sorted({row.processes for row in self._measured.values()})

    def merged(self, rows: Iterable[Row]) -> Table:
        """Return the table with ``rows`` in place of those of the same identity.

        A row without a time replaces none that has one.  Raises :class:`ConfigError` for rows of another device,
        version or number of threads.
        """
        kept = {row.identity: row for row in self.rows}
        for row in rows:
            if row.n > 0 or row.identity not in kept or kept[row.identity].n == 0:
                kept[row.identity] = row
        _check_place(kept.values(), self.source or "the table")
        return Table(_sorted(kept.values()), self.source, self.path)

    def write(self, path: Path) -> None:
        """Write the CSV file ``path``, all of it or nothing; raises :class:`ConfigError` if that cannot be."""
        frame = pd.DataFrame([dataclasses.asdict(row) for row in self.rows], columns=list(COLUMNS))
        text = io.StringIO()
        frame.to_csv(text, index=False, float_format="%.6g", lineterminator="\n")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.getvalue())
        except OSError as error:
            raise ConfigError(f"cannot write kernel table {path}: {error.strerror}") from None


def read(path: Path) -> Table:
    """Return the table in the CSV file ``path``; raises :class:`ConfigError` that says what is wrong with it."""
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except OSError as error:
        raise ConfigError(f"cannot read kernel table {path}: {error.strerror}") from None
    except (ValueError, pd.errors.ParserError) as error:
        raise ConfigError(f"{path} is no kernel table: {str(error).splitlines()[0]}") from None
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise ConfigError(f"{path} is no kernel table: it has no column {missing[0]}; write one with impl kernels")
    rows = [_row(path, number, record) for number, record in enumerate(frame.to_dict("records"), start=2)]
    twice = _first_twice(row.identity for row in rows)
    if twice is not None:
        raise ConfigError(f"{path}: {describe(*twice)} is listed twice")
    _check_place(rows, str(path))
    return Table(_sorted(rows), path.name, str(path))


def _row(path: Path, line: int, record: dict) -> Row:
    values = {}
    for name, kind in COLUMNS.items():
        text = record[name]
        try:
            values[name] = math.nan if text == "" and kind == "float" else _TYPES[str(kind)](text)
        except ValueError:
            raise ConfigError(f"{path} line {line}: {name} must be a number, not {text!r}") from None
    row = Row(**values)
    sound = (
        0 < row.q25 <= row.seconds <= row.q75 < math.inf if row.n > 0 else math.isnan(row.seconds) and bool(row.note)
    )
    if not sound or row.processes < 1 or row.size < 0:
        raise ConfigError(f"{path} line {line}: needs 0 < q25 <= seconds <= q75, or n 0 and a note that says why")
    return row


def _sorted(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (row.kernel, row.key, row.processes, row.size)))


def _first_twice(identities: Iterator[Identity] | Iterable[Identity]) -> Identity | None:
    seen: set[Identity] = set()
    for identity in identities:
        if identity in seen:
            return identity
        seen.add(identity)
    return None


def _check_place(rows: Iterable[Row], where: str) -> None:
    places = sorted({row.place for row in rows})
    if len(places) > 1:
        first, second = (
            f"{device} with torch {torch} and {threads} threads" for _, device, torch, threads in places[:2]
        )
        raise ConfigError(
            f"{where} mixes {first} and {second}: keep a table for each, or measure it again with --fresh"
        )


def describe(kernel: str, key: str, size: int, processes: int) -> str:
    """Return a kernel as people read it: ``update muon 768x256 with 2 processes``."""
    sized = f" of size {size}" if size else ""
    busy = f"with {processes} processes" if processes > 1 else "with 1 process"
    return f"{kernel} {key}{sized} {busy}"


def block_key(block: Block, kind: str | None = None) -> str:
    """Return the key of ``forward`` and ``backward``: whatever of the model decides the time of this part.

    kind: another part of the same model, ``attention`` for a layer's core attention alone.
    """
    a, kind = block.arch, kind or block.kind
    heads = f"q{a.num_attention_heads}-kv{a.num_key_value_heads}-d{a.head_dim}"
    parts = {
        "layer": [f"h{a.hidden_size}", f"f{a.intermediate_size}", heads + ("-norm" if a.qk_norm else "")],
        "attention": [heads],
    }.get(kind, [f"h{a.hidden_size}", f"v{a.vocab_size}"])
    cut = f"tp{block.tp}" + (f"-sp{block.norm_ranks}" if block.norm_ranks > 1 else "")
    return " ".join([kind, *parts, cut, f"{block.rows}x{block.sequence}", block.dtype])


_TURNS = {"stagger", "offset"}
"""Settings that say when a matrix has its refresh, which changes nothing in the mean over a period."""


def settings_digest(optimizer: Optimizer) -> str:
    """Return eight digits that stand for the optimizer's settings."""
    return canonical_digest(optimizer.hyper.model_dump(mode="json", exclude=_TURNS))[:8]


def update_key(optimizer: Optimizer, shape: Shape) -> tuple[str, int]:
    """Return key and size of an ``update``: matrices have a shape, elementwise rules a number of elements."""
    name = f"{optimizer.name} {settings_digest(optimizer)}"
    if optimizer.atomic:
        return f"{name} {'x'.join(map(str, shape))}", 0
    return name, math.prod(shape)


def product_key(m: int, n: int, k: int, dtype: str) -> str:
    """Return the key of a ``product`` ``[m, k] [k, n]``."""
    return f"{m}x{n}x{k} {dtype}"


def collective_key(ranks: int, *, even: bool = True) -> str:
    """Return the key of a collective; the size of one with segments is that of all of them together."""
    return f"{ranks} ranks" + ("" if even else " uneven")
