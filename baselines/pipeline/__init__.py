"""Pipeline baselines, one file each; they import impl, never the reverse."""
