"""Jobs on several nodes: how they find each other, exchange messages, and end together."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC writes to stderr, and reads this when it is imported
