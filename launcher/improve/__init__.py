"""`gpurun improve`: remedies tried on a program or workload; the proven ones are handed over as a change."""
