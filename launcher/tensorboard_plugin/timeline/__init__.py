"""An index of a variant's traces that serves any window of the timeline quickly."""
