"""Builds sdist and wheel into dist/ and tries both as a stranger would: `make release-check`.

Each is installed into an environment of its own, runs a job, serves the tab, and is uninstalled again.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, distributions
from pathlib import Path

from tools.environment import CONSTRAINTS, RELEASE, ROOT, Environment, fitting_build, packages_of, requirement

DIST = ROOT / "dist"
NAME = "gpurun-torch"
JOB = """\
name: release
workload: mlp
params: {width: 32}
devices: cpu:2
global_batch: 16
compare: {split: [even, "3:1"]}
steps: {rounds: 4}
"""
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla|HPND|Zlib|0BSD|CNRI|Unlicense)",
    re.IGNORECASE,
)
"""Licences under which a dependency may be used in any program."""
OF_NVIDIA = re.compile(r"^nvidia-|^cuda-")
"""Libraries that CUDA builds of torch bring: NVIDIA's own licence, which torch's users accept anyway."""


def build() -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(RELEASE.python, "-m", "build", "--outdir", DIST, ROOT)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    run(RELEASE.python, "-m", "twine", "check", "--strict", sdist, wheel)
    return sdist, wheel


def check_metadata(wheel: Path) -> str:
    """The version, which wheel, changelog and tag share; the wheel installs one name."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata: Message = Parser().parsestr(archive.read(path).decode())
    version = metadata["Version"]
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    expect(metadata["Name"] == NAME, f"the wheel is named {metadata['Name']}")
    expect(tops == {"gpurun"}, f"the wheel installs {sorted(tops)}")
    for field in ("License-Expression", "Classifier", "Keywords", "Requires-Python"):
        expect(field in metadata, f"the metadata lack {field}")
    check_addresses(metadata, os.environ.get("REPOSITORY_URL", "").rstrip("/"))
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    expect(first is not None and first[1] == version, f"CHANGELOG.md doesn't begin with {version}")
    tag = os.environ.get("GITHUB_REF_NAME", "") if os.environ.get("GITHUB_REF_TYPE") == "tag" else ""
    expect(tag in ("", f"v{version}"), f"the tag is {tag}, the version {version}")
    return str(version)


def check_addresses(metadata: Message, url: str) -> None:
    """Links lead to the repository from wherever the description is shown; without a `url` there are none."""
    projects = [line.partition(", ")[2] for line in metadata.get_all("Project-URL") or ()]
    targets = re.findall(r"\]\((?!#)([^)\s]+)\)", str(metadata.get_payload()))
    expect(bool(targets), "the description has no links")
    if not url:
        expect(not projects, f"REPOSITORY_URL isn't set, but the metadata have {projects}")
        return
    elsewhere = [project for project in projects if not f"{project}/".startswith(f"{url}/")]
    expect(bool(projects) and not elsewhere, f"project URLs aren't below {url}: {elsewhere or 'none'}")
    relative = [target for target in targets if "://" not in target]
    expect(not relative, f"PyPI shows the description with dead links: {relative}")


def try_out(package: Path, version: str) -> None:
    """Installs the package in a new environment, uses it in an empty directory, and removes it."""
    print(f"{package.name}: install, job, tab, uninstall", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpurun-release-") as name:
        directory = Path(name)
        environment = Environment(directory / "environment")
        environment.begin()
        torch = requirement(environment, os.environ.get("TORCH") or fitting_build(environment))
        environment.install("-c", str(CONSTRAINTS), *torch, str(package))
        work = directory / "work"
        work.mkdir()
        use(environment, work, version)
        check_licences(environment)
        environment.pip("uninstall", "--yes", "--quiet", NAME)
        left = [str(path) for path in environment.directory.rglob("*gpurun*")]
        expect(not left, f"uninstalling leaves {left}")


def use(environment: Environment, work: Path, version: str) -> None:
    """Version, a job of the user's, its report, and the tab in TensorBoard."""
    gpurun = environment.directory / "bin/gpurun"
    said = run(gpurun, "--version", cwd=work)
    expect(version in said, f"`gpurun --version` says {said}")
    run(gpurun, "init", "first.yaml", cwd=work)
    run(gpurun, "check", "first.yaml", cwd=work)
    (work / "job.yaml").write_text(JOB)
    table = run(gpurun, "job.yaml", "--out", "run", cwd=work)
    expect("12/4" in table, f"the table lacks a split: {table}")
    expect(run(gpurun, "report", "run", cwd=work) != "", "there is no report")
    with tab(gpurun, work) as url:
        script = urllib.request.urlopen(f"{url}/static/index.js", timeout=60).read()
        runs = urllib.request.urlopen(f"{url}/runs", timeout=60).read()
        expect(b"export" in script and b"release" in runs, "the tab isn't served, or doesn't list the run")


@contextmanager
def tab(gpurun: Path, work: Path) -> Iterator[str]:
    """The plugin's address in a TensorBoard over `work`."""
    with subprocess.Popen([gpurun, "view", "."], cwd=work, stdout=subprocess.PIPE, text=True) as viewer:
        try:
            assert viewer.stdout is not None
            said = viewer.stdout.readline()
            found = re.search(r"http://\S+?(?=/?#)", said)
            expect(found is not None, f"`gpurun view` says {said}")
            yield f"{found[0]}/data/plugin/gpurun" if found else ""
        finally:
            viewer.send_signal(signal.SIGINT)


def check_licences(environment: Environment) -> None:
    """Every package that installing gpurun brings may be used in any program."""
    for found in distributions(path=[str(packages_of(environment))]):
        licence = licence_of(found)
        known = PERMISSIVE.search(licence) or OF_NVIDIA.match(found.name)
        expect(bool(known), f"{found.name} {found.version}: its licence is {licence or 'not stated'}")


def licence_of(found: Distribution) -> str:
    """What its metadata say, in whichever field."""
    metadata = found.metadata
    classifiers = [text for text in metadata.get_all("Classifier") or () if text.startswith("License")]
    named = [
        *(metadata.get_all("License-Expression") or ()),
        *classifiers,
        *(metadata.get_all("License") or ()),
    ]
    return next((field.splitlines()[0] for field in named if field.strip()), "")


def run(*command: object, cwd: Path | None = None) -> str:
    """What the command prints, if it ends well.

    Raises:
        SystemExit: it doesn't.
    """
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    expect(done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(f"release-check: {otherwise}")


def main() -> None:
    sdist, wheel = build()
    version = check_metadata(wheel)
    for package in (wheel, sdist):
        try_out(package, version)
    print(f"{NAME} {version} can go out: {sdist.relative_to(ROOT)}, {wheel.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
