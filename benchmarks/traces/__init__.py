"""How fast traces are read and shown, and whether their figures are those of others."""
