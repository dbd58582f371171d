"""Pure functions: a tidy table in, a figure or a printed table out."""
