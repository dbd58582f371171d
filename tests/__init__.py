"""Tests: unit (one process), distributed (several gloo ranks), workflow."""
