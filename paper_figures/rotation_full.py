"""The ``rotation`` experiment with every method at every number of stages (``make full``): same table, same figure."""

from __future__ import annotations

from paper_figures.rotation import figure, main_table, table

__all__ = ["figure", "main_table", "table"]
