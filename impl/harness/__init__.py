"""Specs, data, the training loop, metrics and records."""
