"""An index of a variant's traces, from which any window of the timeline is answered at once."""
