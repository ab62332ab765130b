"""What failed first, how it is reported, and whether a launch should restart."""
