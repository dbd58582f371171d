"""Where refreshes of the bases are spent, at one budget (the ``stage_aware`` experiment)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import pipelines

main_table = pipelines.main_table


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``."""
    return pipelines.comparison_document("Refreshes by stage at one budget", frame, published, ("R7",))


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: final held-out loss of every allocation."""
    return pipelines.finals_figure(frame)
