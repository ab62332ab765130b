"""The connection between node 0 and the others: gRPC streams, proof of the secret, silence."""
