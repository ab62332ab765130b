"""The time that the launches of a run took, by what for."""

from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import Stage, before_s, between_s, stages_s

SPENT_ON: dict[str, tuple[Stage, ...]] = {
    "rounds": ("round",),
    "the program": ("run",),
    "warm-up": ("warmup",),
    "start-up": ("start", "build"),
    "gradient checks": ("check",),
    "balanced splits": ("balance",),
    "traces": ("profile",),
    "memory": ("memory",),
}


def launches_s(run: RunDir) -> dict[str, float]:
    """Seconds that the launches of a run took, by what for, and those before and between them."""
    logs, commands = run.read_all_events().values(), run.read_commands()
    stages = [(event.stage, seconds) for events in logs for event, seconds in stages_s(events)]
    return {
        **{name: sum(s for stage, s in stages if stage in names) for name, names in SPENT_ON.items()},
        "before the first launch": before_s(logs, commands),
        "between launches": sum(between_s(logs, commands)),
    }
