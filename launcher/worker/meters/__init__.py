"""Measurements of a rank next to time: energy, FLOPs, interference."""
