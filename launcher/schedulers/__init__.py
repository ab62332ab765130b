"""Batch systems that gpurun runs under or submits to, one module each."""
