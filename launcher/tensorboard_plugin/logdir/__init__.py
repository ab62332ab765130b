"""What a log directory holds. All of it is untrusted."""
