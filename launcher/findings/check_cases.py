"""The table of what checks of a self-test find, case by case, and of what to do where one fails."""

from collections.abc import Mapping
from dataclasses import dataclass

NOT_REPORTED = "not reported by this driver"
_REPORT = "please report it, with the directory of this self-test"
_BELIEVE_NONE = f"believe no figure of this device: {_REPORT}"


@dataclass(frozen=True)
class Case:
    """Something that is wrong."""

    sentence: str
    """With slots, as that of a kind of finding."""
    remedy: str = ""
    """The advice, with slots for the same figures; empty: that of the check."""


_SPEED = "{device} does {gflop_per_s} GFLOP/s"
_SLOW_PCIE = "{device} has {link} at work, not {expected_link}[; copies reach {gb_per_s} GB/s]"
_SLOW_LINK = (
    "[{link}][all links of {place} are slow]: {gb_per_s} GB/s, but "
    "[{way} carries {carried_gb_per_s}][{other} over {other_way} have {best_gb_per_s}]"
)
FAILED: Mapping[str, Case] = {
    "no-torch": Case("there is no torch", "pip install torch"),
    "driver-silent": Case("the driver doesn't answer: {error}"),
    "no-driver": Case("no driver is installed, or it can't be reached from here[; {notes}]"),
    "gpu-unusable": Case("{problem}", "[{advice}]"),
    "gpus-closed": Case("{notes}", "give this user, or this container, access to their /dev files"),
    "gpus-hidden": Case(
        "{variable}={value} leaves {num_gpus:GPU} visible",
        "name GPUs that exist, or: unset {variable}",
    ),
    "no-gpu": Case("no GPU is here", "to check CPU devices: --devices cpu:2"),
    "parts-of-one-gpu": Case("{devices} are {parts} of one GPU, which {backend} doesn't connect"),
    "gpu-twice": Case(
        "{device} is named more than once: a self-test has one rank for each GPU", "name {device} once"
    ),
    "gpu-busy": Case("{device} is used by other processes: {used}"),
    "disk-full": Case("{free} are free where runs are written, less than {least}"),
    "memory-errors": Case("{device} had {num_errors:memory error} that ECC can't correct"),
    "rows-to-replace": Case("{device} has memory rows that wait for a reset to be replaced"),
    "rows-lost": Case("{device} has memory rows that can't be replaced: no spare ones are left"),
    "other-gpu": Case("rank {rank} uses {uuid}, but {device} is {expected_uuid}"),
    "clock-off": Case("{device} is off by {off_percent}"),
    "impossible-speed": Case(f"{_SPEED} in float32, which can't be", _BELIEVE_NONE),
    "slower-than-like": Case(f"{_SPEED} in float32, but {{other}} {{best_gflop_per_s}}"),
    "slower-than-peak": Case(f"{_SPEED} in float32, but a {{model}} {{peak_gflop_per_s}} at its peak"),
    "slower-than-before": Case(f"{_SPEED}; it did {{before_gflop_per_s}} on {{day}}"),
    "throttled": Case("{device} was throttled: {reason}"),
    "low-clock": Case("{device} ran at {mhz} of {most_mhz}"),
    "wrong-sum": Case("{wrong}, {device}"),
    "impossible-rate": Case("[{link}: ]{gb_per_s} GB/s[ at {size}], which can't be", _BELIEVE_NONE),
    "slow-all-reduce": Case("bus bandwidth {rates}, but {way} carries {carried_gb_per_s} GB/s"),
    "slow-link": Case(_SLOW_LINK),
    "slow-link-of-cpu": Case(_SLOW_LINK, "look for other processes"),
    "slow-pcie": Case(_SLOW_PCIE),
    "unmeasured": Case("[{label}: ]{reason}"),
    "profiler-in-use": Case(
        "{label}: another profiler is in use", "end Nsight, DCGM profiling or ncu on this machine"
    ),
    "no-trace": Case("{label}: no trace was written"),
    "empty-trace": Case("{label}: the trace of rank {rank} has no work in it"),
    "unmatched": Case("{label}: no collective was matched over the ranks"),
    "gradient-differs": Case("{label}: {warning}"),
    "gradient-not-compared": Case("{label}: its gradient was not compared"),
    "no-gradient": Case("none was compared"),
    "wrong-wait": Case("rank {last} is {late_ms} ms late, but rank {rank} waits {wait_ms} ms"),
    "unknown-wait": Case("the wait of rank {rank} isn't known"),
    "not-out-of-memory": Case("it ended as {status}[: {reason}]"),
    "rank-not-named": Case("rank {rank} is not named: {reason}"),
    "memory-kept": Case("{device} still has {kept} more in use"),
    "next-launch-failed": Case("the next launch failed: {reason}"),
    "signal-not-named": Case("SIGKILL is not named: {reason}"),
    "killed-for-memory": Case("that was not meant: {reason}"),
    "no-hang": Case("no hang was noticed"),
    "other-rank-blamed": Case("another rank is blamed: {hang}"),
    "collective-not-named": Case("the collective is not named: {hang}"),
    "steps-missed": Case("{num_steps:step} of rank {rank} recorded, not {num_expected}"),
    "no-memory-seen": Case("rank {rank} was not seen to use memory of its own device"),
    "skips-missed": Case("{num_skips:skipped step} of rank {rank} seen"),
    "forked": Case(
        "ranks can't use their GPUs: something has used CUDA before they were forked",
        "don't use CUDA when a module is imported: move it into a function",
    ),
    "ended-early": Case("“{part}” ended early: {reason}", "[read {log}]"),
    "nothing-found": Case("“{part}” has found nothing"),
}
"""Sentences on failed checks, by the name of the case."""
_PAIRS = "{num_pairs:pair}: {least_gb_per_s} GB/s or more over {way}"
OK: Mapping[str, str] = {
    "torch": "[{driver}; ]torch {version}",
    "cpu-devices": "{num_devices:CPU device} on {num_cores:core}[; {notes}]",
    "gpus": "{num_gpus:GPU}: {models}",
    "parts": "{num_parts:MIG instance}",
    "undivided": "no GPU is divided",
    "gpus-free": "no other process uses them",
    "disk-free": "{free} free",
    "no-memory-errors": f"no uncorrected memory error[; those of {{unknown}} are {NOT_REPORTED}]",
    "one-node": "the machine has one NUMA node",
    "near-nodes": "{places}",
    "measured": "every device and link, by {num_ranks:rank}",
    "gpus-as-named": "{num_ranks:rank} on the GPUs that the driver names",
    "clocks-agree": "within {most_percent} of the host's over half a second",
    "speed": "{least_gflop_per_s} GFLOP/s or more in float32 products",
    "as-before": "{num_alike} of {num_devices:device} as fast as on {days}",
    "unknown-device": "{path} is ignored: it has an unknown device, {device}",
    "no-day": "{path} is ignored: {day} is no day",
    "no-rate": "{path} is ignored: {rate} GFLOP/s can't be",
    "clocks": "{least_mhz} or more at work[; {capped} at the power limit]",
    "power": "{power_w} W at work",
    "energy": f"counted; power is {NOT_REPORTED}",
    "sums": "right in three types, and up to {size}",
    "all-reduce": "bus bandwidth {rates}, over {ways}",
    "pairs": _PAIRS,
    "one-pair": f"{_PAIRS}; what this link should carry is unknown",
    "persistent": "on",
    "not-persistent": "off on {devices}: each launch waits until the driver has initialised it; "
    "nvidia-smi -pm 1 turns it on",
    "pcie": "{links}",
    "slow-pcie": _SLOW_PCIE,
    "strategies": "{labels}",
    "traces": "work on every rank",
    "matched-traces": "work on every rank, and collectives matched over all ranks",
    "gradients": "those of one device: {errors}",
    "late": "{late_ms} ms late, and the others wait {wait_ms} ms",
    "out-of-memory": "rank {rank} named, the next launch worked",
    "memory-freed": "rank {rank} named, memory free, the next launch worked",
    "memory-unknown": f"rank {{rank}} named (memory: {NOT_REPORTED}), the next launch worked",
    "killed": "rank {rank} and SIGKILL named, the next launch worked",
    "asleep": "{hang}",
    "steps": "{num_steps:step} of each rank recorded",
    "steps-and-skip": "{num_steps:step} of each rank recorded, one of them skipped",
}
"""Sentences on checks that passed, and on earlier results that aren't compared."""
_WAITED = "rank {rank} waited for a core {waited_percent} of the time"
SKIPPED: Mapping[str, str] = {
    "not-run": "not run, because of: {checks}",
    "needs-gpu": "needs a GPU",
    "needs-devices": "needs {num_devices:device}",
    "not-reported": NOT_REPORTED,
    "cores-shared": f"[{{num_ranks:rank}} share {{num_cores:core}}: ]{_WAITED}",
    "cores-of-others": f"other processes use the cores: {_WAITED}",
    "nothing-earlier": "no earlier self-test that they can be compared with was found",
    "earlier-busy": "in the earlier self-tests of these devices ranks waited for a core",
    "no-energy": f"the energy counter of {{devices}} is {NOT_REPORTED}",
    "energy-stuck": "the energy counter of {devices} did not advance in half a second at work: energy is "
    f"{NOT_REPORTED}",
    "numa-unknown": "the NUMA node of {devices} is not reported by this machine",
    "nothing-traced": "no strategy could be measured",
    "no-graphs": "CPU devices capture no graphs",
}
"""Why nothing is judged."""
REMEDIES: Mapping[str, str] = {
    "mend-driver": "install or restart the driver",
    "see-devices": "see `gpurun devices`",
    "whole-gpus": "name one part of each GPU in --devices, or undo the division",
    "free-gpus": "end them, or name other GPUs: --devices",
    "free-disk": "free some space, or name another directory: --out",
    "replace-gpu": "replace the GPU unless a restart or a reset helps",
    "report-log": "report it with that rank's log",
    "report-names": "figures would be shown for another GPU: unset CUDA_DEVICE_ORDER, and report it",
    "other-device": "don't believe step times of this device; `gpurun run` on another one",
    "cool-device": "look for other processes, heat and power limits",
    "cool-node": "look for other processes, heat and power limits on that node",
    "what-changed": (
        "look for heat, power limits and new drivers; earlier results no longer compare with new ones"
    ),
    "raise-clock": "improve the cooling, or end limits of the clock",
    "test-links": "don't train here: test each link, then replace what fails",
    "test-network": "don't train here: test each of the nodes' links",
    "see-ways": "see which way collectives take",
    "other-way": "choose another interface (--interface), or see which way collectives take",
    "mend-links": "turn ACS off, and reseat the card or bridge",
    "mend-network": "choose another interface (--interface), or look at cables, ports and switches",
    "reseat-card": "reseat the card, look at riser and slot, and at its speed in the firmware's setup",
    "read-logs": "read the logs of that launch",
    "other-precision": "don't trust training with this precision here",
    "see-memory": "see who holds the memory: `gpurun devices`",
    "read-stacks": "a hang may be blamed on another rank here: read the stacks of all of them",
    "open-firewall": (
        "look for a firewall between the nodes, and read the logs in the directory of this self-test"
    ),
    "report-bug": f"gpurun is wrong here: {_REPORT}",
    "hang-of-gloo": "see all ranks' stacks in that launch's hang.json; gloo speaks through the interface lo",
    "hang-of-nccl": "if NCCL hangs: turn ACS off, or the IOMMU (iommu=pt); try NCCL_P2P_DISABLE=1",
}
"""What to do where a check fails, unless the case knows better."""
