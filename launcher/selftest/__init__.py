"""`gpurun selftest`: runs small jobs of known outcome, and says what of this machine doesn't work."""
