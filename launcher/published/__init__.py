"""Figures that others have published, as data, with where they come from."""
