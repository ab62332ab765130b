"""What the ranks of `gpurun selftest` run: measurements, a model that misbehaves, unchanged programs."""
