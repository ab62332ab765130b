"""`split: balanced`: cost curves of devices, and the split that is provably best for them. Pure."""
