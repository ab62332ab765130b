"""Setting up on bare machines ends well, or with what to install."""
