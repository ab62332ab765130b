"""Parts that every rank uses: its process group, journal, failures, precision."""
