"""One module per command: each parses its options, calls one function and prints."""
