"""GPUs without torch: what their drivers report, what they are sold with, which build of torch fits them."""
