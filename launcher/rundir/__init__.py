"""The run directory: file names, formats, and who works in it."""
