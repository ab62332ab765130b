"""Findings of reports as data, and the table of their kinds."""
