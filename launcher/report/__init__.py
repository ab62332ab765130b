"""Renderers: each takes one `Comparison` and gives text or files back."""
