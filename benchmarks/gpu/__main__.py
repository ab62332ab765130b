"""`python -m benchmarks.gpu [NAME …]`: ordered checks for a machine with one GPU, the most valuable first.

Never aborts, and ends within a limit: each check has one of its own, and none begins with less than 15 s
left; those that didn't, or were cut short, are named at the end, for a second command. `results.tar.gz` in
the results directory is all that is to be taken along, and up to date after every check: `results.txt` (a
line per check and what it found), logs, runs, and the smallest traces. `make gpu-rehearsal` runs it on one
CPU device.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu.summary import of_run, of_search, of_selftest

ROOT = Path(__file__).resolve().parents[2]
FOUND = "FOUND: "
"""How a line begins that `results.txt` takes from the log of a check."""
LEAST_S = 15
END_S = 8
REHEARSED = 4
"""How many times as long as on a GPU a check may take in a rehearsal: other programs may have the cores."""
CAPTURE_BEGINS_S = 40
MAX_ARCHIVE_BYTES = 15_000_000
"""Of the archive: a machine that is lent may give back small files only."""
ARCHIVE = "results.tar.gz"


@dataclass(frozen=True)
class Bench:
    """Where and on what checks run."""

    device: str
    out: Path

    @property
    def on_gpu(self) -> bool:
        return not self.device.startswith("cpu")

    def pick(self, on_gpu: str, rehearsed: str) -> str:
        """The one on a GPU, the other in a rehearsal."""
        return on_gpu if self.on_gpu else rehearsed

    def run(self, *command: str) -> int:
        """Runs a command in the directory of results; its exit code, as of a shell where there is none."""
        try:
            return subprocess.run(command, cwd=self.out, check=False).returncode
        except FileNotFoundError as error:  # `nvidia-smi` in a container
            print(error)
            return 127

    def gpurun(self, *arguments: str) -> int:
        return self.run(sys.executable, "-m", "gpurun", *arguments)

    def job(self, name: str, text: str) -> int:
        """Runs a job, and sums it up."""
        (self.out / f"{name}.yaml").write_text(text)
        code = self.gpurun(f"{name}.yaml", "--out", f"runs/{name}")
        self.sum_up(name)
        return code

    def example(self, name: str, *settings: str) -> int:
        """Runs an example with some of its keys changed, and sums it up."""
        changed = [
            word for each in (f"devices={self.device}", "budget=null", *settings) for word in ("--set", each)
        ]
        code = self.gpurun(str(ROOT / f"examples/{name}.yaml"), "--out", f"runs/{name}", *changed)
        self.sum_up(name)
        return code

    def sum_up(self, name: str) -> None:
        for line in of_run(self.out / "runs" / name):
            print(FOUND + line)


def env(bench: Bench) -> int:
    """The driver's answer to each of gpurun's queries, versions, and the devices."""
    if bench.on_gpu:
        bench.run("nvidia-smi")
        bench.run("nvidia-smi", "topo", "-m")
    bench.run(sys.executable, "-m", "pip", "list")
    bench.run(sys.executable, "-m", "benchmarks.gpu.nvml_probe")
    bench.gpurun("--version")
    return bench.gpurun("devices")


def selftest(bench: Bench) -> int:
    path = bench.out / "selftest.json"
    with path.open("w") as file:
        command = [
            sys.executable,
            "-m",
            "gpurun",
            "selftest",
            "--devices",
            bench.device,
            "--json",
            "--out",
            "runs/selftest",
        ]
        code = subprocess.run(command, cwd=bench.out, stdout=file, check=False).returncode
    for line in of_selftest(path):
        print(FOUND + line)
    return code


def quick(bench: Bench) -> int:
    """Every strategy on one device, a small GPT, with traces and what is allocated."""
    small = "{layers: 1, width: 32, heads: 2, context: 32}"
    return bench.job(
        "quick",
        f"""
workload: gpt
params: {bench.pick("{layers: 4, width: 512, heads: 8, context: 512}", small)}
devices: ["{bench.pick(bench.device, "cpu:0")}"]
global_batch: 16
precision: bf16
compare: {{strategy: {bench.pick("[single, ddp, dp, zero1, fsdp]", "[ddp, dp]")}}}
steps: {{rounds: 2, launches: 1}}
profile: {{steps: 4, memory: true}}
""",
    )


def gpt124m(bench: Bench) -> int:
    """The example, eager and compiled: MFU, joules, the peak of memory."""
    smaller = (
        "params={layers: 1, width: 32, heads: 2, context: 32}",
        "global_batch=4",
        "compare.compile=[false]",
        "strategy=single",
    )
    sizes = ("until=fixed", "steps={rounds: 3, launches: 1}", "profile={steps: 3}")
    return bench.example("gpt124m", *sizes, *(() if bench.on_gpu else smaller))


def loop(bench: Bench) -> int:
    """By hand against gpurun, and events against CUPTI."""
    return bench.run(
        sys.executable, "-m", "benchmarks.gpu.loop", bench.pick(bench.device, "cpu"), "runs/loop"
    )


def trace(bench: Bench) -> int:
    """All tables, the JSON and the merged timeline of a variant's traces."""
    variants = sorted((bench.out / "runs/quick/variants").glob("*ddp*"))
    if not variants:
        print(FOUND + "no traces: run `quick` first")
        return 1
    codes = [
        bench.gpurun("trace", str(variants[0]), "--show", "all"),
        bench.gpurun("trace", str(variants[0]), "--merge", "merged.json.gz"),
    ]
    return max(codes)


def program(bench: Bench) -> int:
    """An unchanged program."""
    own = ("--steps", "300", "--batch", "256")
    code = bench.gpurun(
        "run", str(ROOT / "examples/train.py"), "--devices", bench.device, "--out", "runs/program", "--", *own
    )
    bench.sum_up("program")
    return code


def crossover(bench: Bench) -> int:
    """From which size on the GPU is faster than the CPU."""
    sizes = (bench.pick("4096", "256"), bench.pick("8", "2"))
    return bench.job(
        "crossover",
        f"workload: crossover\nparams: {{max_size: {sizes[0]}}}\ndevices: {bench.device}\n"
        f"steps: {{rounds: {sizes[1]}}}\n",
    )


def precision(bench: Bench) -> int:
    """A GPT in every precision."""
    small = "{layers: 1, width: 32, heads: 2, context: 32}"
    return bench.job(
        "precision",
        f"""
workload: gpt
params: {bench.pick("{layers: 6, width: 1024, heads: 16, context: 512, vocabulary: 512}", small)}
devices: {bench.device}
strategy: single
global_batch: {bench.pick("16", "4")}
compare: {{precision: {bench.pick("[fp32, tf32, bf16, fp16]", "[fp32, bf16]")}}}
steps: {{rounds: 2, launches: 1}}
profile: {{steps: 2}}
""",
    )


def oom(bench: Bench) -> int:
    """A batch that fits and one that doesn't: status `oom`, and the next launch works."""
    return bench.job(
        "oom",
        f"""
workload: gpt
params: {bench.pick("{preset: 124M}", "{layers: 1, width: 32, heads: 2, context: 32}")}
devices: {bench.device}
strategy: single
precision: bf16
compare: {{global_batch: {bench.pick("[4, 1024]", "[4, 8]")}}}
steps: {{rounds: 1, launches: 1}}
profile: {{steps: 0}}
""",
    )


def shared(bench: Bench) -> int:
    """Two ranks on one GPU, over gloo: all of the code for several processes."""
    devices = f"[{bench.device}, {bench.device}]" if bench.on_gpu else "cpu:2"
    return bench.job(
        "shared",
        f"""
workload: gpt
params: {{layers: 1, width: {bench.pick("256", "32")}, heads: 2, context: 32}}
devices: {devices}
global_batch: 16
compare: {{strategy: [ddp, dp, fsdp], split: [even, "3:1"]}}
steps: {{rounds: 1, launches: 1}}
profile: {{steps: 2}}
""",
    )


def micro_benchmark(name: str, most: Mapping[bool, str], bench: Bench) -> int:
    """A micro-benchmark; `most` is its parameter on a GPU, or not."""
    compare = "compare: {precision: [fp32, tf32, bf16, fp16]}\n" if name == "matmul" and bench.on_gpu else ""
    rounds = bench.pick("6", "2")
    return bench.job(
        name,
        f"workload: {name}\nparams: {{{most[bench.on_gpu]}}}\ndevices: {bench.device}\n{compare}"
        f"steps: {{rounds: {rounds}}}\n",
    )


def semantics(bench: Bench) -> int:
    """What DataParallel and streams promise, seen on the GPU."""
    return bench.run(sys.executable, str(ROOT / "examples/cuda_semantics.py"))


def resnet50(bench: Bench) -> int:
    """`channels_last` and the search for convolutions."""
    sizes = ("until=fixed", "steps={rounds: 2, launches: 1}", "profile={steps: 2}")
    compare = "compare={channels_last: [false, true], cudnn_benchmark: [false, true]}"
    smaller = (
        "workload=resnet56",
        "params=null",
        "global_batch=4",
        "strategy=single",
        "compare={channels_last: [false, true]}",
    )
    return bench.example("resnet50", *sizes, compare, *(() if bench.on_gpu else smaller))


def improve(bench: Bench) -> int:
    """Of a program pinned memory, TF32 and the fused optimizer; of a job channels_last, too."""
    job = (
        f"workload: {bench.pick('resnet50', 'resnet56')}\ndevices: {bench.device}\nstrategy: single\n"
        f"global_batch: {bench.pick('64', '4')}\n"
    )
    (bench.out / "convolutions.yaml").write_text(job)
    small = () if bench.on_gpu else ("--", "--width", "32", "--layers", "4", "--batch", "16")
    program = (str(Path(__file__).with_name("slow_program.py")), "--devices", bench.device, *small)
    codes = []
    for name, words in {"program": program, "job": ("convolutions.yaml",)}.items():
        place = f"runs/improve/{name}"
        options = ("--budget", bench.pick("150s", "120s"), "--numerics", "--quiet", "--out", place)
        codes.append(bench.gpurun("improve", *options, *words))
        for line in of_search(bench.out / place):
            print(FOUND + line)
    return max(codes)


def capture(bench: Bench) -> int:
    """`gpurun stacks` and `gpurun capture` of a program that runs."""
    own = ("--steps", "1000000", "--batch", "256")
    words = (
        "run",
        str(ROOT / "examples/train.py"),
        "--devices",
        bench.device,
        "--out",
        "runs/capture",
        "--quiet",
    )
    running = subprocess.Popen([sys.executable, "-m", "gpurun", *words, "--", *own], cwd=bench.out)
    try:
        deadline = time.monotonic() + CAPTURE_BEGINS_S
        while running.poll() is None and time.monotonic() < deadline:
            if any((bench.out / "runs/capture").glob("variants/*/rank0.jsonl")):
                break
            time.sleep(0.2)
        code = bench.gpurun("stacks", "runs/capture")
        code = max(code, bench.gpurun("capture", "runs/capture"))
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait()
    traces = sorted((bench.out / "runs/capture").glob("launches/*/captures/**/*.json.gz"))
    print(FOUND + f"{len(traces)} captured traces")
    return code or int(not traces)


def tests(bench: Bench) -> int:
    """What `make gpu-test` runs, less the self-test."""
    options = (
        "-o",
        "addopts=--strict-markers --import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
    )
    files = [str(ROOT / "tests/gpu" / name) for name in ("test_drivers_here.py", "test_jobs_here.py")]
    here = () if bench.on_gpu else ("--devices", bench.device)
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={ROOT}", *options, *files, *here]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    limit_s: int
    run: Callable[[Bench], int]
    only_gpu: bool = False


CHECKS = (
    Check("env", 90, env),
    Check("selftest", 170, selftest),
    Check("quick", 120, quick),
    Check("shared", 90, shared),
    Check("h2d", 60, partial(micro_benchmark, "h2d", {True: "max_mib: 1024", False: "max_mib: 4"})),
    Check("program", 60, program),
    Check("capture", 70, capture),
    Check("gpt124m", 170, gpt124m),
    Check("loop", 170, loop),
    Check("resnet50", 150, resnet50),
    Check("trace", 60, trace),
    Check("crossover", 60, crossover),
    Check("precision", 90, precision),
    Check("oom", 60, oom),
    Check("matmul", 60, partial(micro_benchmark, "matmul", {True: "max_size: 8192", False: "max_size: 256"})),
    Check("improve", 360, improve),
    Check("semantics", 40, semantics, only_gpu=True),
    Check("tests", 330, tests, only_gpu=True),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; 1 if one of them failed, was stopped or didn't begin."""
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; without one, all")
    parser.add_argument("--device", default="cuda:0", help="cpu:1 rehearses them")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="the directory of the results")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds that all may take together")
    parser.add_argument("--wheels", type=Path, help="a directory with wheels that this machine lacks")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.names} - {*names}):
        parser.error(f"there is no check {', '.join(unknown)}; there are {', '.join(names)}")
    out = options.out.resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    bench = Bench(options.device, out)
    if options.one:
        (chosen,) = (check for check in CHECKS if check.name == options.names[0])
        return chosen.run(bench)
    wanted = [
        check
        for check in CHECKS
        if check.name in (options.names or names) and (bench.on_gpu or not check.only_gpu)
    ]
    with tempfile.TemporaryDirectory() as directory, (out / "results.txt").open("a", buffering=1) as results:
        environment = _environment(options.wheels, Path(directory))
        left, failed = [], []
        for check, code, is_left in _run_all(wanted, bench, options.limit, environment, results.write):
            left += [check.name] if is_left else []
            failed += [check.name] if code != 0 else []
    print(f"{len(wanted) - len(failed)} of {len(wanted)} checks passed; results are in {out}")
    if left:
        given = {name: getattr(options, name) for name in ("device", "out", "wheels")}
        for name, value in given.items():
            left += [f"--{name}", str(value)] if value != parser.get_default(name) else []
        print(f"to run next: python -m benchmarks.gpu {shlex.join(left)}")
    return int(bool(failed))


def _run_all(
    checks: Sequence[Check],
    bench: Bench,
    limit_s: float,
    environment: Mapping[str, str],
    write: Callable[[str], object],
) -> Iterator[tuple[Check, int | None, bool]]:
    """Each check, its exit code, `None` where it didn't begin, and whether the limit of all has left it out
    or cut it short."""
    deadline = time.monotonic() + limit_s
    for check in checks:
        left_s = deadline - time.monotonic()
        most_s = check.limit_s * (1 if bench.on_gpu else REHEARSED)
        began = time.monotonic()
        code = None
        if left_s >= LEAST_S:
            shutil.rmtree(bench.out / "runs" / check.name, ignore_errors=True)  # of an earlier command
            code = _run(check, bench, min(most_s, left_s), environment)
        ended = {None: "not run", 124: "stopped"}.get(code, "ok" if code == 0 else f"failed with {code}")
        lines = [f"{check.name}: {ended} after {time.monotonic() - began:.0f} s"]
        log = bench.out / f"logs/{check.name}.log"
        if code is not None:
            text = log.read_text(errors="replace").splitlines()
            lines += [f"    {line.removeprefix(FOUND)}" for line in text if line.startswith(FOUND)]
            lines += [f"    > {line}" for line in text[-5:]] if code else []
        write("\n".join(lines) + "\n")
        print("\n".join(lines), flush=True)
        _pack(bench.out)
        yield check, code, code is None or (code == 124 and left_s < most_s)


def _run(check: Check, bench: Bench, limit_s: float, environment: Mapping[str, str]) -> int:
    """The check's exit code; 124 if it took too long."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        check.name,
        "--one",
        "--device",
        bench.device,
        "--out",
        str(bench.out),
    ]
    with (bench.out / f"logs/{check.name}.log").open("w") as log:
        started = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return started.wait(limit_s)
        except subprocess.TimeoutExpired:
            end_group(started)
            return 124


def end_group(started: subprocess.Popen[bytes]) -> None:
    """Ends a check with what it has started: a run that is stopped needs some seconds to end its ranks."""
    os.killpg(started.pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            started.poll()
            os.killpg(started.pid, 0)
            time.sleep(0.05)
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def _environment(wheels: Path | None, directory: Path) -> dict[str, str]:
    """That of the checks: gpurun from this checkout, and packages of wheels where there are some."""
    places = [str(ROOT / "src"), str(ROOT)]
    if wheels is not None:
        files = [str(path) for path in sorted(wheels.glob("*.whl"))]
        options = ("--no-index", "--no-deps", "--upgrade", "--target", str(directory))
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, *files], check=True)
        places.insert(0, str(directory))
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*places, *([before] if before else [])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "150", "NO_COLOR": "1"}


def _pack(out: Path) -> None:
    """Results as one file of a size that can be taken along: traces last, small files before large ones."""
    files = [path for path in out.rglob("*") if path.is_file() and not path.name.startswith(ARCHIVE)]
    chosen = [path for path in files if not path.name.endswith(".pickle")]
    draft = out / f"{ARCHIVE}.new"
    with draft.open("wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(chosen, key=lambda path: (path.name.endswith(".json.gz"), _size(path))):
            if file.tell() + _size(path) < MAX_ARCHIVE_BYTES:
                with suppress(FileNotFoundError):
                    archive.add(path, path.relative_to(out))
    shutil.move(draft, out / ARCHIVE)


def _size(path: Path) -> int:
    """Its size in bytes; 0 where it has vanished meanwhile, as files of a run that ends do."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
