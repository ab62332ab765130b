"""`python -m gpurun.launcher.worker LAUNCH.json RANK`: one rank by hand, as the plan prints it."""

import sys

from gpurun.launcher.worker.entry.workload_rank import main

if __name__ == "__main__":
    main(sys.argv[1:])
