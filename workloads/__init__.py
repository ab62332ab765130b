"""The built-in workloads, and the interface of every workload. Imported as `gpurun.workloads`."""
