"""How the worker's processes start: the server that forks ranks, a rank, the link between nodes."""
