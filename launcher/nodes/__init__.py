"""Jobs on several nodes: how they find each other, speak, and end together. torch is in `worker/entry/node_link.py`."""
