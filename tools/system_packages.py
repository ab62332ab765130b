"""Installs the packages of the system that some tests need, as root or by sudo without a password.

With the argument `all` those of `make test-all` too.

Where it may not, it says what to install, and those are skipped. With GPURUN_ALL_TESTS that is an error.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

PROGRAMS = {
    "chromium": ("chromium",),
    "iproute2": ("ip", "tc"),
    "slurm-wlm": ("sbatch", "slurmctld"),
    "munge": ("munged",),
    "openmpi-bin": ("mpirun.openmpi",),
    "mpich": ("mpirun.mpich",),
    "kubernetes-client": ("kubectl",),
    "zsh": ("zsh",),
}
"""Debian's package → the programs that tests start from it."""
FOR_ROOT = {"iproute2", "slurm-wlm", "munge", "openmpi-bin", "mpich"}
"""What only root's tests need: two hosts in network namespaces, a Slurm of two nodes, `mpirun`."""
FOR_ALL = {"iproute2", "slurm-wlm", "munge", "openmpi-bin", "mpich"}
"""What only tests of `make test-all` need."""
FONTS = "fonts-dejavu-core"
"""Chromium draws with it."""
ALL_TESTS = "GPURUN_ALL_TESTS"
"""Set where no test may be skipped for what the machine lacks."""


def lacking(for_all: bool) -> list[str]:
    """The packages that this user's tests lack.

    Args:
        for_all: also what the slow tests need.
    """
    unused = (FOR_ROOT if os.geteuid() else set()) | (set() if for_all else FOR_ALL)
    return [package for package in PROGRAMS if not has(package) and package not in unused]


def has(package: str) -> bool:
    """Whether all its programs can be started."""
    return all(shutil.which(program) for program in PROGRAMS[package])


def without(*packages: str) -> str:
    """Why tests that need these packages (and root, for some) are skipped; empty where they must run."""
    if os.environ.get(ALL_TESTS):
        return ""
    missing = [package for package in packages if not has(package)]
    if missing:
        return f"needs {listed(missing)}: {command(missing)}"
    return "needs root: sudo make test" if os.geteuid() and FOR_ROOT.intersection(packages) else ""


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def command(packages: Sequence[str]) -> str:
    """What a person types to install them."""
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install {' '.join(packages)}"


def as_root() -> list[str] | None:
    """How to start a command as root without being asked for anything; `None` where that can't be."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    may = sudo and subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode == 0
    return [str(sudo), "-n"] if may else None


def install(packages: Sequence[str]) -> None:
    """Has apt-get install them, which shows its own errors: not every distribution has all."""
    prefix = as_root()
    if prefix is None or not shutil.which("apt-get"):
        return
    apt = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    print(f"installing {', '.join(packages)} for the tests", flush=True)
    options = ["install", "--yes", "--no-install-recommends"]
    subprocess.run([*apt, "update"], stdout=subprocess.DEVNULL, check=False)  # install reports what matters
    for some in (packages, *([package] for package in packages)):
        done = subprocess.run([*apt, *options, *some], stdout=subprocess.DEVNULL, check=False)
        if some is packages and done.returncode == 0:
            return


def main(for_all: bool = False) -> None:
    """Installs what is lacking, or says what its lack means."""
    packages = lacking(for_all)
    if not packages:
        return
    fonts = [FONTS] if "chromium" in packages else []
    install([*packages, *fonts])
    packages = lacking(for_all)
    if not packages:
        return
    needed = listed(packages)
    if os.environ.get(ALL_TESTS):
        raise SystemExit(f"gpurun: no test may be skipped ({ALL_TESTS}), and these need {needed}")
    print(
        f"tests that need {needed} will be skipped; to run them: {command([*packages, *fonts])}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main(for_all=sys.argv[1:] == ["all"])
