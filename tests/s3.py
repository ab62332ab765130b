"""An S3 server in a process of its own, which can go away and come back with what it holds."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

SERVER = """
import sys
from moto.server import ThreadedMotoServer
port = 0
while True:
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(f"http://{host}:{port}", flush=True)
    if not sys.stdin.readline():
        break
    server.stop()
    print("away", flush=True)
    sys.stdin.readline()
"""
"""It holds its buckets in the process, not in the server."""


class S3Server:
    """The server, with a bucket called `bucket`. A context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._next_line()
        self.ask("PUT", "bucket")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    @property
    def env(self) -> Mapping[str, str]:
        """Variables with which whatever reads S3 finds it, and tries once."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def ask(self, method: str, path: str) -> Mapping[str, str]:
        """The headers of its answer, by their names in lower case."""
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.address}/{path}", method=method)
        ) as answer:
            return {name.lower(): value for name, value in answer.headers.items()}

    @contextmanager
    def away(self) -> Iterator[None]:
        """It listens no longer."""
        self._say("go")
        assert self._next_line() == "away"
        yield
        self._say("come back")
        assert self._next_line() == self.address

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def _next_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
