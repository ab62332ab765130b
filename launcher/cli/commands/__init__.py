"""A module per command, or for several related ones: parses options, calls one function and prints."""
