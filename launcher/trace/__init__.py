"""Analyses traces without torch: Kineto files → columns → breakdown → collectives → `TraceReport`."""
