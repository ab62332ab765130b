"""Lines of torchrun, and what they are here."""

import sys

import pytest
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.torchrun import (
    NO_VARIABLE,
    REFUSED,
    SAME,
    TRANSLATED,
    devices_text,
    read_line,
)
from gpurun.launcher.rundir.rank_files import RankFiles


def test_each_option_of_torchs_own_parser_is_in_one_of_the_three_tables() -> None:
    theirs = {action.dest for action in get_args_parser()._actions} - {"help"}
    ours = [*SAME, *TRANSLATED, *REFUSED]
    assert theirs == set(ours)
    assert len(ours) == len(set(ours))


def test_the_variables_of_torchs_own_parser_are_read_and_no_others() -> None:
    actions = get_args_parser()._actions
    without = {each.dest for each in actions if each.option_strings and not isinstance(each, env | check_env)}
    assert without - {"help"} == NO_VARIABLE
    environ = {f"PET_{name.upper()}": "node" for name in NO_VARIABLE}
    assert read_line(["train.py"], environ) == read_line(["train.py"], {})


@pytest.mark.parametrize(
    ("words", "what", "value"),
    [
        ("--nproc-per-node 2 train.py --epochs 1", "args", ("--epochs", "1")),
        ("--nproc_per_node=2 train.py --nproc-per-node 3", "args", ("--nproc-per-node", "3")),
        ("--nproc-per-node 2 -m package.train", "module", "package.train"),
        ("--nproc_p 2 train.py", "num_processes", "2"),
        ("--standalone train.py", "nodes", 1),
        (
            "--standalone --rdzv-backend etcd --rdzv-id x --master-port 7 t.py",
            "overrides",
            ("steps.launches=1",),
        ),
        ("--nnodes 2:2 --node-rank 1 --master-addr a --master-port 7 t.py", "rendezvous", "a:1007"),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint a:65000 t.py", "rendezvous", "a:64000"),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint a:64536 t.py", "rendezvous", "a:63536"),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint a:64535 t.py", "rendezvous", "a:65535"),
        (
            "--nnodes 2 --node-rank 1 --master-addr a t.py",
            "overrides",
            ("steps.launches=1", 'env.TORCHELASTIC_RUN_ID="none"', "nodes=2", "master_port=29500"),
        ),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:9 --rdzv-conf is_host=1 t.py", "node_rank", None),
        (
            "--nnodes=2 --rdzv-backend=c10d t.py",
            "overrides",
            ("steps.launches=1", 'env.TORCHELASTIC_RUN_ID="none"', "nodes=2"),
        ),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=b:9 t.py", "rendezvous", "b:9"),
        (
            "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=b:9 --rdzv-conf is_host=1,join_timeout=60 t.py",
            "node_rank",
            0,
        ),
        (
            "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=b:9 --rdzv-conf is_host=1,join_timeout=60 t.py",
            "join_timeout_s",
            60.0,
        ),
        (
            "--max-restarts 3 --shutdown-timeout 9 t.py",
            "overrides",
            ("steps.launches=1", "restarts=3", "grace=9s"),
        ),
        ("--rdzv-conf join_timeout=10m t.py", "join_timeout_s", None),  # nothing reads it
        ("--shutdown-timeout 0 t.py", "overrides", ("steps.launches=1", "grace=0.001s")),
        (
            "--master-addr localhost --master-port 7 t.py",
            "overrides",
            ("steps.launches=1", 'env.TORCHELASTIC_RUN_ID="none"', "master_port=7"),
        ),
        ("--rdzv-id 12 t.py", "overrides", ("steps.launches=1",)),  # torch takes a new one
        (
            "--rdzv-id 12 --rdzv-backend c10d t.py",
            "overrides",
            ("steps.launches=1", 'env.TORCHELASTIC_RUN_ID="12"'),
        ),
        (
            "--role rank --signals-to-handle SIGTERM,SIGUSR1 t.py",
            "overrides",
            (
                "steps.launches=1",
                'env.ROLE_NAME="rank"',
                'env.TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM,SIGUSR1"',
            ),
        ),
        ("--redirects 3 --tee 0 t.py", "quiet", True),
        ("--redirects 3 --tee 3 t.py", "quiet", False),
        ("--tee 0:1,1:2 t.py", "files", RankFiles("", 0, {0: 1, 1: 2})),
        ("--redirects 3 t.py", "files", None),
        ("--redirects 0:1,1:2 t.py", "files", RankFiles("", {0: 1, 1: 2}, 0)),
        ("--log-dir d -r 3 -t 0:1 t.py", "files", RankFiles("d", 3, {0: 1})),
        ("--log-dir d t.py", "files", RankFiles("d", 0, 0)),
        ("--log-dir d --redirects 3 t.py", "quiet", False),
        ("--nnodes 2 --node-rank 0 --master-addr a --local-addr 10.0.0.7 t.py", "interface", "10.0.0.7"),
        ("--no-python run.sh 1", "args", ("run.sh", "1")),
        ("--run-path --no-python /t.py 1", "args", ("1",)),
        ("--run-path --no-python --module /t.py 1", "script", "/t.py"),
        ("--local-ranks-filter 0,2 t.py", "only_local_ranks", {0, 2}),
        ("--local-ranks-filter 1 t.py", "only_local_ranks", {1}),
    ],
)
def test_a_line_is_translated(words: str, what: str, value: object) -> None:
    assert getattr(read_line(words.split(), {}), what) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nnodes 1:4 t.py", "--nnodes 1:4 has no counterpart"),
        ("--numa-binding socket t.py", "`gpurun --set bind=cores torchrun …` gives each rank its own cores"),
        ("--no-python --module t.sh", "exclude each other"),
        ("--rdzv-backend etcd t.py", "--rdzv-backend etcd has no counterpart"),
        ("--virtual-local-rank t.py", "--virtual-local-rank has no counterpart"),
        ("--redirects 0:1,1:4 t.py", "--redirects 0:1,1:4 is neither 0 to 3 nor a list"),
        ("--local-ranks-filter 0,b t.py", "--local-ranks-filter b is not a whole number"),
        ("--signals-to-handle SIGUSR2 t.py", "SIGUSR2 has no counterpart"),
        ("--start-method bogus t.py", "invalid choice: 'bogus'"),
        ("--nproc-per-node 2", "required: training_script"),
        ("--no-such 2 t.py", "unrecognized arguments|required"),
        ("--max-restarts many t.py", "not a whole number"),
        ("--rdzv-backend c10d --rdzv-conf join_timeout=10m t.py", "join_timeout 10m is not a whole number"),
        ("--rdzv-endpoint host t.py", "--rdzv-endpoint host has no port: write HOST:29500"),
        ("--rdzv-endpoint host:x t.py", "--rdzv-endpoint host:x has no port"),
        ("--nnodes 2 --master-port 0 t.py", "--master-port 0 is not a whole number of at least 1"),
        ("--nnodes 0 t.py", "--nnodes 0 is not a whole number of at least 1"),
        ("--nnodes 0:0 t.py", "--nnodes 0 is not a whole number of at least 1"),
        ("--nnodes 2:x t.py", "--nnodes x is not a whole number of at least 1"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_the_reason(words: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        read_line(words.split(), {})


def test_variables_stand_in_for_options() -> None:
    environ = {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "2", "PET_MODULE": "0"}
    line = read_line(["--max-restarts", "1", "train.py"], environ)
    assert (line.num_processes, line.module, line.overrides) == (
        "4",
        None,
        ("steps.launches=1", "restarts=1"),
    )


def test_blanks_around_a_number_are_no_mistake() -> None:
    environ = {"PET_NPROC_PER_NODE": " 2", "PET_NNODES": "2 :02", "PET_NODE_RANK": "1 "}
    line = read_line(["--master-addr", "a", "--master-port", " 7", "train.py"], environ)
    assert (line.nodes, line.node_rank, line.rendezvous) == (2, 1, "a:1007")
    assert devices_text(line, 0, 8, "") == "cpu:2"


def test_torchs_watchdog_is_refused() -> None:
    with pytest.raises(SpecError, match=r"ENABLE_FILE_TIMER=1 has no counterpart: .*hang-timeout"):
        read_line(["train.py"], {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    assert read_line(["train.py"], {"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}).script == "train.py"


def test_another_python_is_refused_where_torchrun_would_start_it() -> None:
    environ = {"PYTHON_EXEC": "/other/python"}
    with pytest.raises(SpecError, match="PYTHON_EXEC=/other/python has no counterpart: unset it"):
        read_line(["train.py"], environ)
    assert read_line(["--no-python", "run.sh"], environ).args == ("run.sh",)
    assert read_line(["train.py"], {"PYTHON_EXEC": sys.executable}).script == "train.py"


@pytest.mark.parametrize("words", ["", "--shutdown-timeout 9"])
def test_the_time_for_saving_may_be_in_torchs_own_variable(words: str) -> None:
    line = read_line([*words.split(), "t.py"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"})
    assert line.overrides == ("steps.launches=1", "grace=9s" if words else "grace=120s")


@pytest.mark.parametrize(
    ("num", "num_gpus", "devices"),
    [
        ("2", 0, "cpu:2"),
        ("2", 4, "cuda:0,cuda:1"),
        ("auto", 4, "cuda"),
        ("auto", 0, "cpu:8"),
        ("gpu", 4, "cuda"),
        ("cpu", 4, "cpu:8"),
    ],
)
def test_processes_become_devices(num: str, num_gpus: int, devices: str) -> None:
    line = read_line(["--nproc-per-node", num, "train.py"], {})
    assert devices_text(line, num_gpus, 8, "cuda" if num_gpus else "") == devices


def test_no_process_is_an_error() -> None:
    line = read_line(["--nproc-per-node", "0", "train.py"], {})
    with pytest.raises(SpecError, match="--nproc-per-node 0 is not a whole number of at least 1"):
        devices_text(line, 2, 16, "cuda")


def test_more_processes_than_gpus_are_an_error_that_says_what_to_write() -> None:
    line = read_line(["--nproc-per-node", "8", "train.py"], {})
    with pytest.raises(SpecError, match="gpurun --devices cpu:8 torchrun"):
        devices_text(line, 2, 16, "cuda")
