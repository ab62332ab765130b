"""`split: balanced`: cost curves of devices, and the provably optimal split. Pure functions."""
