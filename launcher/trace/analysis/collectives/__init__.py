"""The collectives of all ranks: which belong together, who waited, and how far clocks are apart."""
