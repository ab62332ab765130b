"""What a rank measures next to time: energy, FLOPs, interference."""
