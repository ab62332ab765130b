"""Code of the ranks of `gpurun selftest`: measurements, a model that misbehaves, unchanged programs."""
