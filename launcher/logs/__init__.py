"""The output of the ranks: read, cut into lines, shown with the rank in front."""
