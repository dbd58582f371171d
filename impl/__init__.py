"""ricercar: a benchmark and reproduction harness for distributed LLM training."""

__version__ = "0.1.0"
