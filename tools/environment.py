"""Makes the virtual environments of this repository: `sh tools/python.sh tools/environment.py NAME`.

An environment is complete when `.ready` is in it, which is written last and says of what it was made. One
without is removed and made again, whatever the interrupted command had come to; so is one that has moved, or
whose Python is another now. Where only the requirements have changed, pip brings it up to date.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from gpurun.launcher.machine.accelerators import DEFAULT, INDEX, build_for  # noqa: E402
from gpurun.launcher.machine.gpus.nvml import has_driver, inspect_nvidia_gpus  # noqa: E402

CONSTRAINTS = ROOT / "constraints.txt"
PYTHON = "python{}.{}".format(*sys.version_info)
"""`python3.11`: the one that runs this, and of every environment."""
OURS = ".made-by-make"
"""In every environment of ours, from its first moment on: no other one is ever removed."""
READY = ".ready"
FROM_PYPI = "pypi"
"""The value of TORCH for the build that PyPI has."""
MISLEADING = ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
"""Variables that would have pip install elsewhere or something else."""
PROBE = ("--timeout", "5", "--retries", "0")


@dataclass(frozen=True)
class Contents:
    """Of what an environment was made."""

    python: str
    place: str
    requirements: str
    """Hash of the files."""
    torch: str
    """Its build of torch: `cpu`, `cu126`, `pypi`; empty where it has none."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in a directory of its own."""

    directory: Path
    requirements: tuple[Path, ...] = ()
    """The files that say what is in it."""
    torch: str = ""
    """The build of torch that it must have; empty: the one that fits."""

    @property
    def python(self) -> Path:
        return self.directory / "bin/python"

    def contents(self, torch: str) -> Contents:
        """What a new one would be made of."""
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in self.requirements))
        return Contents(f"{sys.version} {sys.base_prefix}", str(self.directory), digest.hexdigest(), torch)

    def made_of(self) -> Contents | None:
        """What it was made of; `None` if it isn't complete."""
        try:
            return Contents(**json.loads((self.directory / READY).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def begin(self) -> None:
        """An environment in which pip may install.

        Raises:
            SystemExit: the directory has something that `make` didn't put there, or gets no pip.
            OSError: it can't be written.
        """
        wanted, found = self.contents(self.torch), self.made_of()
        if found and (found.python, found.place) == (wanted.python, wanted.place):
            (self.directory / READY).unlink()
            return
        self.remove()
        self.directory.mkdir()
        (self.directory / OURS).touch()
        venv.create(self.directory, symlinks=True)
        done = self.run("ensurepip", "--default-pip", stdout=subprocess.DEVNULL)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["ensurepip failed"])[-1]
            raise SystemExit(f"gpurun: {self.directory.name} can't be made: {reason}")

    def remove(self) -> None:
        """Removes what an earlier `make` has left.

        It is renamed first: half removed, it would look like somebody else's.

        Raises:
            SystemExit: the directory has something that `make` didn't put there.
        """
        discarded = self.directory.with_name(f"{self.directory.name}-discarded")
        shutil.rmtree(discarded, ignore_errors=True)
        if not os.path.lexists(self.directory):
            return
        marks = (OURS, READY)  # the second alone: made by an earlier version
        is_ours = any((self.directory / mark).exists() for mark in marks) or not any(self.directory.glob("*"))
        if self.directory.is_symlink() or not is_ours:
            name = self.directory.name
            raise SystemExit(f"gpurun: {name} was not made by `make`: rm -r {name}")
        self.directory.rename(discarded)
        shutil.rmtree(discarded)

    def finish(self, torch: str = "") -> None:
        """Marks it as complete."""
        draft = self.directory / f"{READY}.new"
        draft.write_text(json.dumps(asdict(self.contents(torch)), indent=1))
        draft.replace(self.directory / READY)

    def is_ready(self) -> bool:
        """Whether it is complete and has what is asked for."""
        found = self.made_of()
        return found is not None and found == self.contents(self.torch or found.torch)

    def pip(self, *arguments: str, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
        """Runs pip, and returns what it writes to stderr; stdout may ask for a password."""
        return self.run("pip", "--disable-pip-version-check", *arguments, stdout=stdout)

    def run(self, *module: str, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a module in the environment, and lets it hold the lock of `main`: it may outlive this."""
        environ = {key: value for key, value in os.environ.items() if key not in MISLEADING}
        environ["PIP_USER"] = "0"  # pip's own configuration may say otherwise
        command = [str(self.python), "-m", *module]
        return subprocess.run(
            command,
            env=environ,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            close_fds=False,
        )

    def install(self, *arguments: str) -> None:
        """Installs packages.

        Raises:
            SystemExit: pip failed; it has said why, or this does.
        """
        done = self.pip("install", "--quiet", *arguments)
        if done.returncode:
            check_network(done)
        print(done.stderr, end="", file=sys.stderr, flush=True)
        if done.returncode:
            again = "the next `make` starts again"
            raise SystemExit(f"gpurun: {self.directory.name} is not complete, pip says why above; {again}")


EDITABLE = ("--config-settings", "editable_mode=compat", "-e", f"{ROOT}[dev]")
"""gpurun by path: setuptools' import hook would cost every command 20 ms."""
MAIN = Environment(ROOT / ".venv", (ROOT / "pyproject.toml", CONSTRAINTS), os.environ.get("TORCH", ""))
TRAINER = Environment(ROOT / ".venv-trainer", (ROOT / "tests/trainer-requirements.txt",))
ENGINES = Environment(ROOT / ".venv-engines", (ROOT / "tests/engines-requirements.txt",))
SITE = Environment(ROOT / ".venv-site", (ROOT / "docs/site/requirements.txt",))
FLOOR = Environment(ROOT / ".venv-floor", (ROOT / "pyproject.toml",), os.environ.get("TORCH", ""))
NEWEST = Environment(ROOT / ".venv-newest", (ROOT / "pyproject.toml",), os.environ.get("TORCH", ""))
RELEASE = Environment(ROOT / ".venv-release", (ROOT / "tools/release-requirements.txt",))


def make_main(main: Environment) -> None:
    """`.venv`: gpurun from this checkout, and what its tests need."""
    torch = main.torch or fitting_build(main)
    main.install("-c", str(CONSTRAINTS), *requirement(main, torch), *EDITABLE)
    # pip compiles all packages but editable ones, and where PYTHONDONTWRITEBYTECODE is set (many containers)
    # nothing else would: 60 ms. compileall follows no links.
    sources = [str(ROOT / name) for name in ("launcher", "workloads", "src/gpurun")]
    main.run("compileall", "-q", *sources)
    main.finish(torch)


def make_trainer(trainer: Environment) -> None:
    """`.venv-trainer`: sees gpurun and the packages of `.venv`, and adds a Hugging Face Trainer."""
    (packages_of(trainer) / "parent.pth").write_text(f"{packages_of(MAIN)}\n{ROOT / 'src'}\n")
    make_plain(trainer)


def make_plain(environment: Environment) -> None:
    """What its files name: neither torch nor gpurun."""
    for path in environment.requirements:
        environment.install("-r", str(path))
    environment.finish()


def make_floor(floor: Environment) -> None:
    """gpurun with the oldest versions that it allows; torch is the pinned one, but of PyPI's builds."""
    oldest = [each.replace(">=", "==") for each in dependencies()]
    if floor.torch == FROM_PYPI:
        floor.install(*oldest, *EDITABLE)
        floor.finish(FROM_PYPI)
    else:
        make_unpinned(floor, *(each for each in oldest if not each.startswith("torch=")))


def make_unpinned(environment: Environment, *requirements: str) -> None:
    """gpurun with the newest versions that the requirements allow; torch is the pinned one."""
    torch = environment.torch or fitting_build(environment)
    environment.install(*requirement(environment, torch), *requirements, *EDITABLE)
    environment.finish(torch)


def dependencies() -> list[str]:
    """Of gpurun, as `pyproject.toml` has them."""
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])


STEPS: Mapping[str, Sequence[tuple[Environment, Callable[[Environment], None]]]] = {
    "main": [(MAIN, make_main)],
    "trainer": [(MAIN, make_main), (TRAINER, make_trainer)],
    "engines": [(ENGINES, make_plain)],
    "site": [(SITE, make_plain)],
    "release": [(RELEASE, make_plain)],
    "floor": [(FLOOR, make_floor)],
    "newest": [(NEWEST, make_unpinned)],
}
"""What the command line can name, and the environments that it takes."""


def packages_of(environment: Environment) -> Path:
    """Its `site-packages`; every environment here has the Python that runs this."""
    return environment.directory / f"lib/{PYTHON}/site-packages"


def fitting_build(environment: Environment) -> str:
    """The build of torch for this machine's NVIDIA GPUs and their driver; without any, `cpu`."""
    if not has_driver():
        return "cpu"
    environment.install("-c", str(CONSTRAINTS), "nvidia-ml-py")
    site.addsitedir(str(packages_of(environment)))
    found = inspect_nvidia_gpus({})  # whatever CUDA_VISIBLE_DEVICES leaves visible now
    build = build_for(found)
    if build is None and found.gpus:
        print(f"driver {found.driver} is too old for torch: its CPU build is installed", flush=True)
    return FROM_PYPI if build == DEFAULT else build or "cpu"


def requirement(environment: Environment, build: str) -> Sequence[str]:
    """How to ask pip for a build of torch: from the indexes that it is set up with, or else from torch's own.

    Raises:
        SystemExit: no index that can be reached has it.
    """
    version = pinned("torch")
    if build == FROM_PYPI:
        return (f"torch==={version}",)  # `==` would take `+cpu` too
    exact, index = f"{version}+{build}", f"{INDEX}/{build}"
    if exact in versions(environment):
        return (f"torch=={exact}",)
    if exact in versions(environment, "--index-url", index, *PROBE):
        return (f"torch=={exact}", "--extra-index-url", index)
    raise SystemExit(
        f"gpurun: {index} has no torch {version} for {PYTHON}, or can't be reached. PyPI's build has"
        " gigabytes of CUDA libraries, and runs without a GPU too: make setup TORCH=pypi"
    )


def check_network(failed: subprocess.CompletedProcess[str]) -> None:
    """Says so if pip has failed for want of a network: it ends with conflicts of versions then.

    Raises:
        SystemExit: no index has answered.
    """
    found = re.search(r"connection broken by '(.*)': /", failed.stderr)
    if found:
        *_, last = re.split(r": |, '|\('", found[1])  # an error in an error, as Python shows them
        reason = re.sub(r"^\[Errno -?\d+\] |['\"]?\)*$", "", last)
        proxy = "a proxy or another index is set by HTTPS_PROXY and PIP_INDEX_URL"
        raise SystemExit(f"gpurun: pip can't reach its package index ({reason}); {proxy}")


def pinned(package: str) -> str:
    """Its version in constraints.txt."""
    (version,) = (
        line.removeprefix(f"{package}==")
        for line in CONSTRAINTS.read_text().splitlines()
        if line.startswith(f"{package}==")
    )
    return version


def versions(environment: Environment, *options: str) -> list[str]:
    """All versions of torch that pip can install here.

    Raises:
        SystemExit: it can't ask.
    """
    done = environment.pip("index", "versions", "torch", *options, stdout=subprocess.PIPE)
    if done.returncode:
        check_network(done)
    lines = done.stdout.splitlines()
    offered = (line.partition(":")[2] for line in lines if line.startswith("Available versions:"))
    return [version.strip() for line in offered for version in line.split(",")]


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Waits while another `make` or what it has started is at work."""
    lock = os.open(directory, os.O_RDONLY)
    os.set_inheritable(lock, True)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another `make` in this directory", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def main(name: str) -> None:
    """Makes the environments that are not complete.

    Raises:
        SystemExit: one can't be made.
    """
    with locked(ROOT):
        for environment, make in STEPS[name]:
            if not environment.is_ready():
                print(f"setting up {environment.directory.name} (once; a minute or two)", flush=True)
                try:
                    environment.begin()
                    make(environment)
                except OSError as error:
                    raise SystemExit(f"gpurun: {environment.directory.name} can't be made: {error}") from None


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        raise SystemExit(130) from None
