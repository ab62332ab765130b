"""The machine that the tests of this directory run on: real GPUs, or CPU devices as a rehearsal."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.machine.accelerators import CUDA, inspect_gpus, installed_torch
from gpurun.launcher.machine.gpus.gpu import Gpu, Gpus
from gpurun.launcher.machine.host import host_record, inspect_machine

LIMITS = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 1.2e-2, "bf16": 1e-1, "fp16": 1.2e-2}
"""Largest relative difference to the gradient of one device."""
LONGEST_S = 900.0
"""Of a command: on GPUs a block of each of up to 13 variants takes a second, and every start several."""


@dataclass
class Report:
    """What the tests found, for a person who reads it elsewhere."""

    lines: list[str] = field(default_factory=list)

    def found(self, name: str, text: str) -> None:
        """A figure of this machine."""
        self.lines.append(f"{name}: {text}")

    def hold(self, check: Mapping[str, Any]) -> None:
        """A check as `{"name", "status", "found", "remedy"}`; one that failed fails the test."""
        self.found(str(check["name"]), f"{check['status']}: {check['found']}")
        if check["status"] == "skipped":
            pytest.skip(str(check["found"]))
        assert check["status"] == "ok", f"{check['name']}: {check['found']}. {check['remedy']}"


REPORT = Report()


@dataclass(frozen=True)
class Devices:
    """What a job of these tests runs on."""

    kind: str
    """`cuda`, or `cpu` in a rehearsal."""
    count: int

    @property
    def is_gpu(self) -> bool:
        return self.kind == CUDA.name

    def first(self, count: int) -> str:
        """As the value of `devices` in a job file."""
        return json.dumps([f"{self.kind}:{index}" for index in range(count)])

    def name(self, index: int) -> str:
        """What torch calls a device in a program that sees all."""
        return f"{self.kind}:{index}" if self.is_gpu else self.kind


def devices_here(wanted: str | None) -> Devices:
    """The GPUs that the driver shows; what `--devices cpu:2` names in a rehearsal.

    Of instances (MIG) the first alone: a process sees one, and NCCL connects none that share a GPU.

    Raises:
        UsageError: other devices are named.
    """
    if wanted:
        kind, _, count = wanted.partition(":")
        if kind != "cpu" or not count.isdecimal():
            raise pytest.UsageError(f"--devices {wanted}: a rehearsal is on CPU devices, such as cpu:2")
        return Devices(kind, int(count))
    gpus = inspect_gpus(os.environ).gpus
    return Devices(CUDA.name, 1 if has_parts(gpus) else len(gpus))


def has_parts(gpus: Sequence[Gpu]) -> bool:
    """Whether some are instances (MIG), of which torch doesn't count as many as the driver shows."""
    return any(gpu.uuid.startswith(CUDA.part_prefix or "") for gpu in gpus)


def why_none(found: Gpus) -> str | None:
    """Why there is nothing to test; `None` where there are GPUs, or a driver that doesn't answer."""
    if found.gpus or found.nvml_error:
        return None
    return "; ".join(found.notes) or "no GPU here"


def why_unusable(found: Gpus, in_torch: int) -> str | None:
    """Why torch can't use the GPUs that the driver shows; `None` where it sees some, or there are none."""
    if found.nvml_error:
        return f"the driver doesn't answer: {found.nvml_error}"
    if problem := next((gpu.unusable for gpu in found.gpus if gpu.unusable), None):
        return problem
    return f"the driver shows {len(found.gpus)} GPUs, but torch none" if found.gpus and not in_torch else None


def outcome_text(answer: pytest.TestReport) -> str:
    """`passed`, or `skipped: no GPU here`."""
    reason = str(answer.longrepr[2]).removeprefix("Skipped: ") if isinstance(answer.longrepr, tuple) else ""
    return f"{answer.outcome}: {reason}" if answer.skipped and reason else answer.outcome


def summary(results: Mapping[str, str]) -> str:
    """`30 passed, 7 skipped`; says so where nothing was tested."""
    counts = Counter(outcome.partition(":")[0] for outcome in results.values())
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return text if set(counts) != {"skipped"} else f"{text}: nothing of this machine was tested"


def torch_text() -> str:
    """`2.13.0+cu130, built for cuda 13.0`."""
    build = installed_torch()
    if build is None:
        return "not installed"
    kinds = (f"{kind} {build.built_for[kind]}" for kind in ("cuda", "hip", "xpu") if kind in build.built_for)
    return f"{build.version}, built for {', '.join(kinds) or 'CPUs'}"


def tests_by_outcome(results: Mapping[str, str]) -> list[str]:
    """A line per outcome with its tests; a reason that many have is written once."""
    outcomes = dict.fromkeys(results.values())
    return [
        f"- {outcome} ({', '.join(name for name, each in results.items() if each == outcome)})"
        for outcome in outcomes
    ]


def report_text(results: Mapping[str, str]) -> str:
    """The whole report: the machine, what the tests found, how each ended."""
    record = host_record(inspect_machine())
    gpus = record.pop("gpus")
    shown = ("name", "uuid", "bus", "memory_gib", "capability", "peer_links", "numa_node", "unusable")
    lines = ["# gpurun on GPUs", "", summary(results), "", "## Machine", "", f"- torch: {torch_text()}"]
    lines += [f"- {key}: {value}" for key, value in record.items() if key != "topology"]
    lines += [f"- GPU {gpu['index']}: " + ", ".join(f"{key} {gpu[key]}" for key in shown) for gpu in gpus]
    lines += ["", "## Found", "", *(f"- {line}" for line in REPORT.lines)]
    lines += ["", "## Tests", "", *tests_by_outcome(results)]
    return "\n".join(lines) + "\n"


def write_report(path: Path, results: Mapping[str, str]) -> str:
    """The report, kept at `path`."""
    text = report_text(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return text
