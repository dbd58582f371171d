"""Exact parameter shapes of the model families, and the trainable modules."""
