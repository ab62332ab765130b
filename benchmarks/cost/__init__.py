"""What gpurun costs: its start, its hooks, its launches."""
