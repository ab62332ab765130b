"""Jobs on several nodes: how they find each other, exchange messages, and end together."""
