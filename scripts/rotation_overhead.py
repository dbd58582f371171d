"""What an update of basis rotation costs over one of AdamW on the same matrix, from a table of measured kernels.

python scripts/rotation_overhead.py TABLE.csv OUT.csv
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from impl.errors import ConfigError
from impl.harness.record import write_atomically
from impl.optimizers.base import create
from impl.projection import kernel_table
from impl.projection.measured import Measured


def overhead(table: kernel_table.Table) -> pd.DataFrame:
    """Return a row for each matrix whose rotation was measured: seconds of both updates, and their ratio.

    The update of basis rotation is the mean over its period, 10 steps; ``spike`` is its slowest step.
    Raises :class:`ConfigError` if AdamW was not measured at such a size, or nothing was rotated.
    """
    rotation, adamw, machine = create("basis-rotation"), create("adamw"), Measured(table)
    key, _ = kernel_table.update_key(rotation, ())
    rows = []
    for row in table.rows:
        if row.kernel == "update" and row.key.startswith(key) and row.processes == 1 and row.n > 0:
            shape = tuple(int(side) for side in row.key.removeprefix(key).strip().split("x"))
            base = float(machine.update(adamw, shape).seconds[0])
            facts = {"kind": "measured", "device": row.device, "shape": "x".join(map(str, shape))}
            rows.append({**facts, "rotation_s": row.seconds, "spike_s": row.spike, "adamw_s": base,
                         "ratio": row.seconds / base, "n": row.n, "torch": row.torch, "commit": row.commit,
                         "date": row.date})  # fmt: skip
    if not rows:
        raise ConfigError("the table has no update of basis rotation with its default settings: measure it first")
    return pd.DataFrame(rows)


def main(argv: list[str]) -> int:
    """Write the CSV file and print it."""
    try:
        found = overhead(kernel_table.read(Path(argv[0])))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_atomically(Path(argv[1]), found.to_csv(index=False, float_format="%.6g"))
    print(found[["shape", "rotation_s", "adamw_s", "ratio"]].to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
