"""What `make` runs to set up this repository, and to check a release of it."""
