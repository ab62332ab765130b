"""The statistics behind every verdict; pure functions on floats, without torch."""
