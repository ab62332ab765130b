"""Answers of the routes, as plain data."""
