"""A bare Debian in a directory, with users of its own; it shares the network and nothing else. Needs root."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.timing import RESULTS

REPOSITORY = RESULTS.parents[1]
MIRROR = "http://deb.debian.org/debian"
USERS = ("root", "helper", "guest")
"""root, a user who may use sudo without a password, and one who may not."""
SHARED = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")
"""What it takes to reach the package indexes as this machine does."""
ENTER = """
mount --bind "$ROOT" "$ROOT"
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
mount --rbind /sys "$ROOT/sys"
for place in $PLACES; do
    mkdir -p "$ROOT$place"
    mount --bind "$place" "$ROOT$place"
done
exec chroot --userspec="$NAME" "$ROOT" /bin/sh -c 'cd && "$@"' sh "$@"
"""
"""The root is a mount of its own: `ip -n` changes how `/` propagates, which only a mount has."""
LIMIT_S = 3600.0
GONE_S = 0.02


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None
    """`None`: it was killed on purpose."""
    seconds: float
    text: str

    @property
    def last(self) -> str:
        """What it said last."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return next((line for line in reversed(lines) if not line.startswith("make: ***")), "")


class Root:
    """A Debian with make, sudo and no Python. A context manager, which removes it."""

    def __init__(self, suite: str, places: Sequence[Path] = ()) -> None:
        self.suite, self.places = suite, places
        self.directory = Path(tempfile.mkdtemp(prefix=f"gpurun-fresh-{suite}-"))
        self.directory.chmod(0o755)

    def __enter__(self) -> Self:
        command = ["debootstrap", "--variant=minbase", "--include=make,sudo,ca-certificates", self.suite]
        subprocess.run([*command, self.directory, MIRROR], stdout=subprocess.DEVNULL, check=True)
        for name in SHARED:
            if Path(name).exists():
                shutil.copy(name, f"{self.directory}{name}")
        for name in USERS[1:]:
            self.run("useradd", "--create-home", name)
        (self.directory / "etc/sudoers.d/helper").write_text("helper ALL=(ALL) NOPASSWD: ALL\n")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["rm", "-rf", "--one-file-system", self.directory], check=True)

    def home(self, user: str) -> Path:
        """As this machine sees it."""
        return self.directory / ("root" if user == "root" else f"home/{user}")

    def install(self, *packages: str) -> None:
        """Installs Debian's packages, in silence.

        Raises:
            RuntimeError: apt-get failed.
        """
        options = ("--yes", "--no-install-recommends")
        done = self.run(
            "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "install", *options, *packages
        )
        if done.code:
            raise RuntimeError(done.text)

    def check_out(self, user: str) -> Path:
        """A new copy of the repository's HEAD in the user's home, instead of an older one."""
        place = self.home(user) / "gpurun"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        archive = subprocess.Popen(["git", "-C", REPOSITORY, "archive", "HEAD"], stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", place], stdin=archive.stdout, check=True)
        archive.wait()
        self.run("chown", "-R", f"{user}:", f"/{place.relative_to(self.directory)}")
        return place

    def run(self, *command: str, user: str = "root", until: Path | None = None) -> Ended:
        """Runs a command in the user's home.

        Args:
            until: all its processes are killed as soon as this is there; a pattern, as this machine sees it.
        """
        start = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", ENTER, "sh", *command],
                env=self._environ(user),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            killed = until is not None and _kill_when(process, until)
            process.wait(LIMIT_S)
            output.seek(0)
            return Ended(None if killed else process.returncode, time.monotonic() - start, output.read())

    def _environ(self, user: str) -> Mapping[str, str]:
        """Nothing of this machine's but how to reach the indexes."""
        network = {
            key: value
            for key, value in os.environ.items()
            if key.startswith("PIP_") or "_CERT" in key or key.lower().endswith("_proxy")
        }
        return network | {
            "ROOT": str(self.directory),
            "NAME": f"{user}:{user}",
            "PLACES": " ".join(map(str, self.places)),
            "HOME": "/root" if user == "root" else f"/home/{user}",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "PIP_FIND_LINKS": " ".join(map(str, self.places)),
        }


def _kill_when(process: subprocess.Popen[bytes], until: Path) -> bool:
    """Whether the command was killed, since what it waits for came before it ended."""
    while process.poll() is None:
        if any(until.parents[-1].glob(str(until.relative_to("/")))):
            process.kill()
            return True
        time.sleep(GONE_S)
    return False
