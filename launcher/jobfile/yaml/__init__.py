"""Reading YAML: a tree that remembers the line and column of every value."""
