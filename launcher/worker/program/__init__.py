"""A program that runs unchanged, with its steps observed from outside."""
