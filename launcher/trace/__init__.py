"""Where the time goes: Kineto traces → columns → breakdown → collectives → `TraceReport`, without torch."""
