"""How the worker's processes start: the server that forks ranks, and the body of a rank of a workload."""
