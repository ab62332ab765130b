"""Tables that are shown on request: shapes, collectives by size, copies, launches, the critical path."""
