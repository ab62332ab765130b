"""Runs `gpurun` as a person does: a command with a terminal-less stdout, in a directory of its own."""

import json
import secrets
import socket
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gpurun.launcher.rundir.records import MEASURED
from tests import forkserver

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = ROOT / ".venv-trainer" / "bin" / "python"
"""The Python that has frameworks and trackers; `make trainer` sets it up, `make test-all` does it too."""
ENGINES = ROOT / ".venv-engines" / "bin" / "python"
"""The Python that has Ray; `make engines` sets it up, `make test-all` does it too."""
TIMEOUT_S = 120
"""A command that takes longer hangs."""


@dataclass(frozen=True)
class Result:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str
    directory: Path

    def ended(self, code: int = 0) -> Self:
        """The same; fails with what it said where it ended with another code."""
        assert self.code == code, self.err
        return self

    @property
    def json(self) -> Any:
        assert self.out, f"exit code {self.code}: {self.err}"
        return json.loads(self.out)

    @property
    def measured(self) -> Any:
        """The JSON of a comparison, without what is derived from it for readers: figures and metrics."""
        data = {key: value for key, value in self.json.items() if key != "metrics"}
        variants = [{k: v for k, v in variant.items() if k != "figures"} for variant in data["variants"]]
        return data | {"variants": variants}

    @property
    def comparison(self) -> Any:
        return json.loads((self.directory / "run" / "comparison.json").read_text())

    def variant(self, variant_id: str) -> Any:
        return next(v for v in self.comparison["variants"] if v["id"] == variant_id)


def ending(variant: Any) -> str:
    """A variant's status, where it has no error: whether its steps are steady is the machine's affair."""
    status = str(variant["status"])
    return "ok" if status in MEASURED else status


def gpurun(
    directory: Path,
    *args: str,
    env: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    is_cold: bool = False,
) -> Result:
    """`gpurun ARGS` in `directory`; never with a traceback of ours.

    Args:
        is_cold: in a new interpreter, not as a fork of one that has imported everything.
    """
    done = forkserver.run("gpurun", *args, cwd=directory, env=env, timeout_s=timeout_s, is_cold=is_cold)
    return Result(done.returncode, done.stdout, done.stderr, directory)


def answer_of(result: Result) -> str:
    """The answer in the JSON that a command has printed."""
    return str(result.json["findings"][0]["text"])


def write(directory: Path, name: str, text: str) -> Path:
    """A file with `text`, dedented."""
    path = directory / name
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return path


SLEEP_JOB = """
    name: naps
    workload: sleep
    params: {alpha_ms: 5, beta_ms: 5}
    devices: cpu:2
    global_batch: 8
    compare: {split: [even, [6, 2]]}
    steps: {rounds: 8}
    profile: {steps: 1}
"""
"""ddp 4/4 takes 25 ms, 6/2 takes 35: 40 % slower."""

MODEL = """
    import os, signal, sys, time
    import torch
    from gpurun import Workload

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            misbehave(x, self.calls)
            return self.layer(x)

    def batch(size, generator):
        x = torch.randn(size, 4, generator=generator)
        return x, x.sum(1).gt(0).long()

    def build():
        return Workload(Model(), batch, loss=torch.nn.functional.cross_entropy)
"""

MODEL_JOB = """
    workload: model.py:build
    devices: cpu:2
    global_batch: 8
    compare: {split: [even, [6, 2], [5, 3]]}
    steps: {rounds: 3}
    profile: {steps: 0}
"""


def misbehaving(directory: Path, body: str, job: str = MODEL_JOB) -> Path:
    """A job whose model runs `body` in every forward pass: `x` is its input, `calls` counts from 1."""
    inner = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    (directory / "model.py").write_text(textwrap.dedent(MODEL) + f"\ndef misbehave(x, calls):\n{inner}\n")
    return write(directory, "job.yaml", job)


def free_port() -> int:
    """A port that was free a moment ago, and that the system gives to nobody who asks for any."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = first // 2 + secrets.randbelow(first // 4)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
