"""A running job seen from outside: stacks, collectives, who is missing in a hang."""
