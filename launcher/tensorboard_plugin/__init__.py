"""The GPURUN tab of TensorBoard. README.md in this directory describes what server and page agree on."""
