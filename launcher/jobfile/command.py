"""The job that `gpurun run` means, as the text of a job file."""

import json
from collections.abc import Sequence
from pathlib import Path

from gpurun.launcher.jobfile.values import safe_name


def program_job(script: str | None, module: str | None, args: Sequence[str], devices: str) -> str:
    """YAML of a job that runs this program; it is kept in the run directory, and can be run again.

    Args:
        script: path of a Python file; `None` if `module` is one's name.
        devices: as in a job file, or names by commas.
    """
    named: object = devices if "," not in devices else [name.strip() for name in devices.split(",")]
    name = Path(script).stem if script is not None else str(module)
    job: dict[str, object] = {"name": safe_name(name)}
    job |= {"script": script} if script is not None else {"module": module}
    job |= {"args": list(args)} if args else {}
    job |= {"devices": named}
    # JSON is YAML, and has one way to write a text that YAML might take for something else.
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in job.items())
