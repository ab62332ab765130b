"""Traces of a rank by `torch.profiler`: of a variant, of a program, on request."""
