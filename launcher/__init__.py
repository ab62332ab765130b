"""The command `gpurun`: plans, launches, measures and compares. Imported as `gpurun.launcher`."""
