"""What can be wrong with a trace file."""

from gpurun.launcher.errors import GpurunError


class TraceError(GpurunError):
    """A trace can't be read, or no path holds one. The message names the file and, if it can, the byte."""

    exit_code = 2
