"""How the processes of the worker side begin: server, rank, store, link between nodes."""
