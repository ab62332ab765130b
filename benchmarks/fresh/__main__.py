"""`python -m benchmarks.fresh [SUITE …]`: `make` on bare Debians, one after the other; a table of each.

Python 3.11 gets the CPU build of torch that this machine has. For other Pythons a hollow wheel takes its
place, so that nothing but the set-up is tried there. Needs root, debootstrap and a way to Debian and PyPI.
"""

import argparse
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fresh.root import USERS, Ended, Root
from benchmarks.timing import machine_facts, record, table
from tools.environment import pinned

SUITES = {"bookworm": "Debian 12", "trixie": "Debian 13", "testing": "Debian testing"}
WITH_TORCH = "bookworm"
"""Its Python is the one for which this machine has a build of torch."""
INTERRUPTIONS = {
    "killed before pip": ".venv/pyvenv.cfg",
    "killed while pip installs": ".venv/lib/python3*/site-packages/numpy",
}
"""State → what was there when SIGKILL came."""
SOME_TESTS = "-k 'test_costs or test_nodes or test_slurm or test_splits'"
HEADER = ("distribution", "Python", "user", "state", "command", "end", "s", "said last")
MAKE = ("make", "--no-print-directory", "-C", "gpurun")
Row = tuple[str, ...]


def hollow_wheel(directory: Path) -> None:
    """A torch without content, under the version of the CPU build."""
    version = f"{pinned('torch')}+cpu"
    info = f"torch-{version}.dist-info"
    files = {
        "torch/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hollow\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    listed = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(directory / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": listed}.items():
            wheel.writestr(name, text)


class Matrix:
    """The cells of one distribution."""

    def __init__(self, root: Root) -> None:
        self.root, self.python = root, "none"

    def row(self, user: str, state: str, command: str, ended: Ended) -> Row:
        end = "killed" if ended.code is None else "ok" if ended.code == 0 else f"exit {ended.code}"
        said = ended.last.replace("|", "\\|")
        suite = SUITES[self.root.suite]
        row = (suite, self.python, user, state, f"`{command}`", end, f"{ended.seconds:.0f}", said)
        print(" · ".join(row), flush=True)
        return row

    def make(self, user: str, state: str, *arguments: str) -> Row:
        """A row for `make ARGUMENTS` in the user's checkout."""
        ended = self.root.run(*MAKE, *arguments, user=user)
        return self.row(user, state, f"make {' '.join(arguments)}", ended)

    def install(self, *packages: str) -> None:
        self.root.install(*packages)
        said = self.root.run("python3", "-c", "import sys; print('3.%d' % sys.version_info[1])")
        has_venv = self.root.run("python3", "-c", "import ensurepip").code == 0
        self.python = said.last + ("" if has_venv else ", no venv")

    def lacking(self) -> Iterator[Row]:
        """Without a Python that can make environments, each ends with what to install."""
        for user in USERS:
            self.root.check_out(user)
        for packages in ((), ("python3",)):
            if packages:
                self.install(*packages)
            for user in USERS:
                for command in ("setup", "demo", "test"):
                    yield self.make(user, "fresh", command)

    def complete(self) -> Iterator[Row]:
        """With one, a set-up ends well: the first, the second, and after every interruption."""
        self.install("python3-venv")
        for user in USERS:
            yield self.make(user, "fresh", "setup")
            yield self.make(user, "repeated", "setup")
            yield self.works(user)
        yield from self.interrupted("guest")

    def interrupted(self, user: str) -> Iterator[Row]:
        for state, pattern in INTERRUPTIONS.items():
            place = self.root.check_out(user)
            ended = self.root.run(*MAKE, "setup", user=user, until=place / pattern)
            yield self.row(user, state, "make setup", ended)
            yield self.make(user, f"after: {state}", "setup")
            yield self.works(user)

    def works(self, user: str) -> Row:
        """What is there can be used."""
        command = "gpurun check examples/quickstart.yaml"
        ended = self.root.run("sh", "-c", f"cd gpurun && .venv/bin/{command}", user=user)
        return self.row(user, "set up", command, ended)

    def with_torch(self) -> Iterator[Row]:
        """With a real torch: the demo, and tests of everything that needs packages of the system."""
        for user in USERS:
            yield self.make(user, "set up", "demo")
        for user in ("guest", "helper", "root"):
            yield self.make(user, "set up", "test", f"PYTEST_ADDOPTS={SOME_TESTS}")


def try_suite(suite: str, wheels: Path) -> Iterator[Row]:
    """All cells of a distribution."""
    places = [wheels, *map(Path, os.environ.get("PIP_FIND_LINKS", "").split())]
    with Root(suite, places) as root:
        matrix = Matrix(root)
        yield from matrix.lacking()
        yield from matrix.complete()
        if suite == WITH_TORCH:
            yield from matrix.with_torch()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fresh", description=__doc__)
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; without one, all"
    )
    with tempfile.TemporaryDirectory(prefix="gpurun-wheels-") as name:
        hollow_wheel(Path(name))
        Path(name).chmod(0o755)
        for suite in parser.parse_args().suites or SUITES:
            facts = machine_facts()
            rows: list[Row] = []
            try:
                rows.extend(try_suite(suite, Path(name)))
            finally:  # what there is, also after Ctrl-C
                record(f"Setting up on bare machines: {SUITES[suite]}", table(HEADER, rows), facts)


if __name__ == "__main__":
    main()
