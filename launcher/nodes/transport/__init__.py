"""The connection between node 0 and the others: gRPC streams, proof of the secret, silence."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its library writes to stderr, and reads this when imported
