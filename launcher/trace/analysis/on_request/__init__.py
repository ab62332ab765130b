"""Tables that are shown on request: shapes, call trees, copies, launches."""
