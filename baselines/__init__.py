"""Baselines, one file each, behind the same interfaces as ours.  They import impl, never the reverse."""
