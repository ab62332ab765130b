"""Run directory in, `Comparison` out, without torch. What traces say is kept there, to be read once."""
