"""The jobs of a self-test as YAML: small, of known outcome, and each for several checks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpurun.launcher.jobfile.load import job_text
from gpurun.launcher.jobfile.settings import PRECISIONS
from gpurun.launcher.machine.accelerators import accelerator_of, precision_problem
from gpurun.launcher.selftest.evidence import FAULTS, GRADIENTS, MEASURING, PROGRAMS, TRAINING, Evidence

DEVICE_PROGRAM = "gpurun.launcher.worker.selftest.device_program"
MISBEHAVING_MODEL = "gpurun.launcher.worker.selftest.misbehaving_model"
PLAIN_PROGRAMS = "gpurun.launcher.worker.selftest.plain_programs"
SOUND = 10
"""Samples per device with which nothing goes wrong."""
FAULTY = {"late": 9, "oom": 8, "killed": 7, "asleep": 6}
"""Samples per device with which the last device misbehaves."""
PROGRAM_NAMES = ("no-set-device", "loader-workers", "skipped-step")
GRAPH = "graph"
"""The program that only devices with streams can run."""
SLACK_S = 40.0
"""Of jobs that should not hang: a false alarm costs more than the wait."""
_SHORT = {"rounds": 1, "launches": 1, "warmup": 0}
_MODEL = {"workload": "mlp", "params": {"width": 64, "layers": 2}}
_UNTRACED = {"steps": 0}


def job_of(part: str, seen: Evidence, facts: Path) -> str:
    """The job of a part; in `facts` ranks leave what they measure."""
    jobs: Mapping[str, Callable[[], str]] = {
        MEASURING: lambda: measuring_job(seen.devices, facts.resolve()),
        TRAINING: lambda: training_job(seen.devices),
        GRADIENTS: lambda: gradients_job(seen.devices, [gpu.capability for gpu in seen.gpus]),
        FAULTS: lambda: faults_job(seen.devices),
        PROGRAMS: lambda: programs_job(seen.devices),
    }
    return jobs[part]()


def measuring_job(devices: Sequence[str], directory: Path) -> str:
    """Every rank measures its device and its links; what it finds goes to `directory`."""
    kind = accelerator_of(devices[0])
    program = {"module": DEVICE_PROGRAM, "args": [kind.name, str(directory)]}
    return _job("measuring", devices, **program, steps={"launches": 1}, profile=_UNTRACED)


def training_job(devices: Sequence[str]) -> str:
    """Both strategies, even and uneven, with traces."""
    compare = {"strategy": ["ddp", "dp"], "split": _splits(len(devices))}
    batch = 6 * (len(devices) + 1)
    return _job(
        "training", devices, **_MODEL, global_batch=batch, compare=compare, steps=_SHORT, profile={"steps": 2}
    )


def gradients_job(devices: Sequence[str], capabilities: Sequence[tuple[int, int] | None]) -> str:
    """The gradient in every precision that these devices have but that of `training_job`."""
    kind = accelerator_of(devices[0])
    able = [each for each in PRECISIONS if precision_problem(each, kind, capabilities) is None]
    compare = {"precision": [each for each in able if each != "fp32"], "split": _splits(len(devices))[-1:]}
    batch = 6 * (len(devices) + 1)
    return _job(
        "gradients", devices, **_MODEL, global_batch=batch, compare=compare, steps=_SHORT, profile=_UNTRACED
    )


def faults_job(devices: Sequence[str]) -> str:
    """The last rank is late, runs out of memory, is killed, sleeps; each ends a launch but the first."""
    count = len(devices)
    batches = [size * count for size in (SOUND, *FAULTY.values())]
    return _job(
        "faults",
        devices,
        workload=f"{MISBEHAVING_MODEL}:build",
        params={"faulty_device": count - 1, "faults": FAULTY},
        global_batch=batches[0],
        compare={"global_batch": batches},
        gradient_check=False,
        hang_timeout=hang_timeout_s(devices),
        steps=_SHORT,
        profile={"steps": 3},
    )


def hang_timeout_s(devices: Sequence[str], slack_s: float = 8.0) -> float:
    """Longer than a step or the start of a rank takes, also on a busy machine."""
    return slack_s + 1.5 * accelerator_of(devices[0]).start_s


def programs_job(devices: Sequence[str]) -> str:
    """Unchanged programs."""
    kind = accelerator_of(devices[0])
    names = PROGRAM_NAMES if kind.is_host else (*PROGRAM_NAMES, GRAPH)
    return _job(
        "programs",
        devices,
        module=PLAIN_PROGRAMS,
        args=[kind.name],
        compare={"args": [[name] for name in names]},
        steps={"launches": 1},
        profile=_UNTRACED,
    )


def _job(name: str, devices: Sequence[str], **keys: object) -> str:
    """Each ends where it hangs, long before torch gives a collective up, so that the rank can be named."""
    limits = {"hang_timeout": hang_timeout_s(devices, SLACK_S)}
    return job_text({"name": f"selftest-{name}", "devices": list(devices), **limits, **keys})


def _splits(count: int) -> list[str]:
    """Even, and twice as much on the first device as on any other."""
    return ["even", ":".join(["2", *["1"] * (count - 1)])] if count > 1 else ["even"]
