"""`python -m benchmarks.fresh.packages`: the wheel next to the packages that people train with.

Each is imported before gpurun is there and after, alone and with gpurun; TensorBoard starts with all plugins.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.timing import machine_facts, record, table
from tools.environment import ROOT, Environment, fitting_build, packages_of, requirement
from tools.release import NAME, tab

PACKAGES = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "datasets": "datasets",
    "peft": "peft",
    "trl": "trl",
    "diffusers": "diffusers",
    "sentence-transformers": "sentence_transformers",
    "lightning": "lightning",
    "torchmetrics": "torchmetrics",
    "pytorch-ignite": "ignite",
    "torch-geometric": "torch_geometric",
    "torchao": "torchao",
    "torchdata": "torchdata",
    "einops": "einops",
    "skorch": "skorch",
    "captum": "captum",
    "hydra-core": "hydra",
    "optuna": "optuna",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "ray": "ray",
    "deepspeed": "deepspeed",
    "tensorboardX": "tensorboardX",
    "scikit-learn": "sklearn",
}
"""Distribution → module."""
JOB = """\
name: packages
workload: mlp
devices: cpu:2
global_batch: 16
compare: {split: [even, "3:1"]}
steps: {rounds: 4}
"""


def main() -> None:
    """Writes the table."""
    facts = machine_facts()
    with tempfile.TemporaryDirectory(prefix="gpurun-packages-") as name:
        directory = Path(name)
        environment = Environment(directory / "environment")
        environment.begin()
        torch = requirement(environment, fitting_build(environment))
        environment.install(*torch)
        reasons = {package: reason(environment, torch, package) for package in PACKAGES}
        there = {package: module for package, module in PACKAGES.items() if not reasons[package]}
        before, versions = imports(environment, there, ""), installed(environment)
        names = top_level_names(environment)
        environment.install(*torch, str(wheel(environment, directory)))
        after, both = imports(environment, there, ""), imports(environment, there, "import gpurun; ")
        added = top_level_names(environment) - names
        changed = {one for one, version in versions.items() if installed(environment).get(one) != version}
        job = runs(environment, directory)
    rows = [
        [package, versions.get(package.lower(), ""), reasons[package] or "ok"]
        + [found.get(package, "") for found in (before, after, both)]
        for package in PACKAGES
    ]
    header = ["package", "version", "installs", "import before", "after", "with `import gpurun`"]
    about = (
        f"{len(there)} of {len(PACKAGES)} install next to torch here. Installing gpurun changes the version "
        f"of {', '.join(sorted(changed)) or 'none'}, and adds these names: {', '.join(sorted(added))}. "
        f"A job, and the tab in a TensorBoard with the plugins of all: {job}."
    )
    record("Next to other packages", f"{about}\n\n{table(header, rows)}", facts)


def reason(environment: Environment, torch: Sequence[str], package: str) -> str:
    """Why pip can't install the package next to this torch; empty if it has."""
    done = environment.pip("install", "--quiet", *torch, package)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    print(package, "installed" if not done.returncode else errors, flush=True)
    return (
        "" if not done.returncode else (errors or ["no"])[-1].removeprefix("ERROR: ").replace("|", "/")[:80]
    )


def imports(environment: Environment, modules: Mapping[str, str], first: str) -> dict[str, str]:
    """By package: `ok`, or the error's last line."""
    found = {}
    for package, module in modules.items():
        done = subprocess.run(
            [environment.python, "-c", f"{first}import {module}"], capture_output=True, text=True, check=False
        )
        last = (done.stderr.strip().splitlines() or [""])[-1].replace("|", "/")
        found[package] = "ok" if done.returncode == 0 else last[:80]
    return found


def installed(environment: Environment) -> dict[str, str]:
    return {one.name.lower(): one.version for one in distributions(path=[str(packages_of(environment))])}


def top_level_names(environment: Environment) -> set[str]:
    """What can be imported."""
    places = packages_of(environment).iterdir()
    return {re.sub(r"\..*", "", one.name) for one in places if not one.name.endswith("-info")}


def wheel(environment: Environment, directory: Path) -> Path:
    done = environment.pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(ROOT))
    print(done.stderr, end="", flush=True)
    (found,) = directory.glob(f"{NAME.replace('-', '_')}*.whl")
    return found


def runs(environment: Environment, directory: Path) -> str:
    """`ok`, or what a job or the tab says."""
    gpurun = environment.directory / "bin/gpurun"
    (directory / "job.yaml").write_text(JOB)
    done = subprocess.run(
        [gpurun, "job.yaml", "--out", "run"], cwd=directory, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    with tab(gpurun, directory) as url:
        return "ok" if url else "no address"


if __name__ == "__main__":
    main()
