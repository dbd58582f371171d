"""Without a stash: backward on newer weights than forward (the ``no_stash`` experiment)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import pipelines

main_table = pipelines.main_table


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``."""
    return pipelines.comparison_document("With and without stashed weights", frame, published, ("R9",))


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: final held-out loss with and without stash."""
    return pipelines.finals_figure(frame)
