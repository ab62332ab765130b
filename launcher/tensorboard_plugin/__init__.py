"""The GPURUN tab of TensorBoard. What server and page agree on is in README.md beside this file."""
