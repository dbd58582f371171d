"""Pipelines of LLaMA-7B and 13B on one node: time of an update, idle time and memory (the ``llama`` experiment)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from impl.harness.pipeline_results import FILLING
from paper_figures import common, markdown, pipeline_time, pipelines
from paper_figures.published import block as published_block

CLAIMS = ("R10", "R11", "R12")


def by_model(frame: pd.DataFrame) -> pd.DataFrame:
    """Return ``frame`` with lines of each model of their own: where there are several, a method's name says which."""
    if len(common.distinct(frame, "model")) < 2:
        return frame
    models = frame["model"].astype(str)
    return frame.assign(system=models + "/" + frame["system"], system_name=models + ", " + frame["system_name"])


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table: measured rates beside planned idle time and bytes."""
    return pipeline_time.main_table(by_model(frame))


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``."""
    blocks = [
        "Rates and times are **measured**: time between the ends of two updates on the last stage, median and "
        f"quartiles over n updates, the first {FILLING} left out.  Weights, activations and stash are fp32.  *Bubble* "
        "and bytes are **planned** from schedule and shapes; a stash in host memory counts here too.  A pipeline that "
        "did not fit says *out-of-memory*; `python -m impl cost --tier TIER --hardware NAME llama` says so before.",
        main_table(frame),
    ]
    if any(v for (v,) in common.distinct(frame, "shared_cores")):
        blocks.append("*shared cores*: more processes than CPU cores, so these times say nothing about scaling.")
    stages = pipeline_time.stages_table(pipelines.lines(by_model(frame)))
    blocks += ["## Bytes by stage (planned)", stages, common.problems(frame)]
    blocks += [published_block(published, CLAIMS, "rotation's"), common.provenance(frame)]
    return markdown.document("LLaMA pipelines on one node", *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: measured samples per second, and planned bytes of the fullest stage."""
    return pipeline_time.figure(by_model(frame), published)
