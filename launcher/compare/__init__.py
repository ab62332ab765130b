"""Run directory in, `Comparison` out; pure, without torch."""
