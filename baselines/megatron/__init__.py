"""Subclasses of Megatron-core's own optimizers that run on any device.  Importing them imports Megatron."""
