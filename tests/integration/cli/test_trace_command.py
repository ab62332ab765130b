"""`gpurun trace` and `gpurun diff` on real captures: recorded on GPUs, and those of a gloo run of our own."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import GpurunError
from tests.integration.command import Result, gpurun, write

REAL = Path(__file__).resolve().parents[4] / "shared" / "traces"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="needs the directory of real traces")

JOB = """
    name: two
    workload: sleep
    params: {alpha_ms: 2, beta_ms: 30}
    devices: cpu:2
    global_batch: 8
    compare: {split: [even, [6, 2]]}
    steps: {rounds: 1}
    profile: {steps: 2}
    gradient_check: false
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `run`, a finished run of two ranks with traces of two variants."""
    directory = tmp_path_factory.mktemp("trace")
    write(directory, "job.yaml", JOB)
    gpurun(directory, "job.yaml", "--out", "run").ended()
    return directory


def traced(directory: Path, *args: str) -> Result:
    return gpurun(directory, "trace", *args)


def test_a_gloo_run_shows_who_waits_for_whom(directory: Path) -> None:
    result = traced(directory, "run/variants/ddp-2-6-2", "--json").ended()
    assert not [each for each in result.json["findings"] if each["level"] == "detail"]
    busy, waiting = result.json["ranks"]
    assert [rank["world_size"] for rank in (busy, waiting)] == [2, 2]
    assert [step["step"] for step in busy["steps"]] == [1, 2]
    # Rank 0 sleeps for 6 samples of 30 ms, rank 1 for 2: that is what rank 1 waits, and rank 0 doesn't.
    for mine, other in zip(waiting["steps"], busy["steps"], strict=True):
        assert mine["exposed_wait_us"] > 60_000
        assert other["exposed_wait_us"] < mine["exposed_wait_us"] / 4
    assert result.json["stragglers"][0]["rank"] == 0
    with gzip.open(directory / "run/variants/ddp-2-6-2/rank0.pt.trace.json.gz", "rt") as file:
        facts = json.load(file)["gpurunRank"]
    assert (facts.keys(), facts["samples"]) == ({"samples", "thread_cpu_ns", "queue_ns"}, 6)


def test_the_tables_name_the_straggler_and_fit_a_pipe(directory: Path) -> None:
    result = traced(directory, "run/variants/ddp-2-6-2", "--steps", "2:3").ended()
    assert "2 ranks on CPU" in result.out
    assert "rank 1 waits" in result.out
    assert "for rank 0's larger batch" in " ".join(result.out.split())
    assert max(map(len, result.out.splitlines())) <= 80
    names = next(line.split() for line in result.out.splitlines() if line.startswith("rank "))
    if_room = {"comm", "host", "data", "kernels"}
    needed = [name for name in names if name not in if_room]
    assert needed == ["rank", "span", "compute", "exposed", "wait", "idle"]


def test_all_ranks_in_one_trace(directory: Path) -> None:
    result = traced(directory, "run/variants/ddp-2-even", "--merge", "all.json.gz", "--steps", "2:3").ended()
    assert "wrote all.json.gz" in result.err
    events = json.loads(gzip.decompress((directory / "all.json.gz").read_bytes()))["traceEvents"]
    assert {event["name"] for event in events if "ProfilerStep" in event["name"]} == {"ProfilerStep#2"}
    assert {event["pid"] for event in events if event.get("cat") == "collective"} != set()


def test_a_run_of_several_variants_is_not_mixed_up(directory: Path) -> None:
    result = traced(directory, "run").ended(2)
    assert "gpurun trace run/variants/ddp-2-6-2" in result.err


def test_the_newest_run_is_looked_through(directory: Path) -> None:
    (directory / "latest").write_text("run\n")
    result = traced(directory, "latest/variants/ddp-2-even", "--json").ended()
    assert len(result.json["ranks"]) == 2
    assert "gpurun trace run/variants/ddp-2-6-2" in traced(directory, "latest").err
    same = "latest/variants/ddp-2-even"
    assert (
        gpurun(directory, "diff", same, "run/variants/ddp-2-even", "--json").json["classes"][0]["change_us"]
        == 0
    )


def test_the_difference_of_two_variants(directory: Path) -> None:
    a, b = "run/variants/ddp-2-even", "run/variants/ddp-2-6-2"
    result = gpurun(directory, "diff", a, b, "--json").ended()
    changes = {change["name"]: change["change_us"] for change in result.json["classes"]}
    assert changes["exposed_wait"] > 25_000  # 120 ms on one of two ranks, less what `even` waits
    assert "exposed wait" in gpurun(directory, "diff", a, b).out


EVEN = "run/variants/ddp-2-even"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("diff", "run", EVEN), "two directories of traces"),
        (("diff", "run", "nowhere"), "there is no run `nowhere`"),
        (("diff", EVEN, EVEN, "--fail-slower", "3%"), "--fail-slower applies to runs"),
        (("trace", "nowhere"), "no such file or directory"),
        (("trace", "empty"), "no traces here"),
        (("trace", EVEN, "--steps", "7:9"), "steps 1 to 2"),
        (("trace", EVEN, "--steps", "2:2"), "holds no step"),
        (("trace", EVEN, "--steps", "x"), "not a range of steps"),
        (("trace", EVEN, "--steps=-1:3"), "not a range of steps"),
        (("trace", EVEN, "--merge", "run/plan.json/out.json"), "there is no directory run/plan.json"),
        (("trace", EVEN, "--merge", "run"), "it is a directory"),
        (("trace", EVEN, "--merge", ""), "it is a directory"),
    ],
)
def test_mistakes_are_explained(
    directory: Path, args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "empty").mkdir(exist_ok=True)
    monkeypatch.chdir(directory)
    done = CliRunner().invoke(cli, args)
    refused = done.exception
    code, text = (
        (refused.exit_code, str(refused))
        if isinstance(refused, GpurunError)
        else (done.exit_code, done.output)
    )
    assert code == 2
    assert said in text


@needs_real
def test_a_real_capture_of_eight_gpus(tmp_path: Path) -> None:
    result = traced(tmp_path, str(REAL / "dlrm_8xV100")).ended()
    assert "8 ranks on Tesla V100" in result.out
    assert "all_to_all" in result.out


@pytest.mark.slow
@needs_real
def test_more_workers_for_the_data_loader_end_the_wait_for_data(tmp_path: Path) -> None:
    files = [str(REAL / "resnet50_V100" / f"num_workers_{n}.pt.trace.json.gz") for n in (0, 4)]
    result = gpurun(tmp_path, "diff", *files, "--json").ended()
    classes = {change["name"]: change for change in result.json["classes"]}
    assert classes["idle_data"]["change_us"] < 0
    assert classes["span"]["percent"] < -10


def test_traces_are_read_without_torch(directory: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['gpurun', *sys.argv[1:]];"
        "from gpurun.launcher.cli.main import main; main()"
    )
    args = ["trace", "run/variants/ddp-2-even"]
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
