"""Where workloads get their samples: files, text, images, random tensors."""
