"""`gpurun improve`: remedies tried on a program; the proven ones are handed over as a change of it."""
