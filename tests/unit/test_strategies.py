"""Strategies and kinds of job are one table each; an unknown name is an error wherever it enters."""

import ast
import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.kinds import JOB_KINDS, workload_kind
from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.launch_config import order_for
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.files import read_json, write_json
from gpurun.launcher.rundir.records import LaunchConfig
from gpurun.launcher.strategies import IN_JOBS, STRATEGIES, strategy_named
from gpurun.launcher.worker.strategies.base import strategy_of
from gpurun.workloads.registry import BUILTINS
from tests.unit.plan.machines import FakeMachine

ROOT = Path(__file__).parents[2]
JOB = "workload: gpt\nglobal_batch: 8\ndevices: cpu:2\n"
UNKNOWN = "fsdpp"


@pytest.mark.parametrize(
    ("more", "overrides", "place"),
    [
        (f"strategy: {UNKNOWN}\n", (), "job.yaml:4:11"),
        (f"compare: {{strategy: [ddp, {UNKNOWN}]}}\n", (), "job.yaml:4:27"),
        (f"baseline: {{strategy: {UNKNOWN}}}\n", (), "job.yaml:4:22"),
        ("", (f"strategy={UNKNOWN}",), "--set strategy"),
        ("", (f"compare.strategy=[{UNKNOWN}]",), "--set compare.strategy"),
    ],
)
def test_a_job_names_no_unknown_strategy(
    tmp_path: Path, more: str, overrides: tuple[str, ...], place: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + more)
    with pytest.raises(SpecError) as caught:
        load_job(path, overrides)
    assert place in str(caught.value)
    assert f'`single`, `dp` or `ddp`, got the text "{UNKNOWN}"' in str(caught.value)


def test_a_job_names_no_strategy_of_programs(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{JOB}strategy: script\n")
    with pytest.raises(SpecError, match='got the text "script"'):
        load_job(path)


def planned(tmp_path: Path) -> tuple[Plan, LaunchConfig]:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    spec, machine = load_job(path), FakeMachine()
    plan = build_plan(spec, machine)
    config = order_for(
        plan,
        spec,
        plan.launches[0],
        run_dir=tmp_path,
        job_dir=tmp_path,
        machine=machine,
        looks=(),
        prior={},
    )
    return plan, config


@pytest.mark.parametrize("kind", [Plan, LaunchConfig])
def test_no_file_of_a_run_is_read_back_with_an_unknown_strategy(tmp_path: Path, kind: type) -> None:
    plan, config = planned(tmp_path)
    path = tmp_path / "file.json"
    write_json(path, plan if kind is Plan else config)
    assert read_json(path, kind)
    path.write_text(path.read_text().replace('"ddp"', f'"{UNKNOWN}"'))
    with pytest.raises(MachineError, match=f"there is no strategy `{UNKNOWN}`; the strategies are single"):
        read_json(path, kind)


def test_the_worker_refuses_an_unknown_strategy(tmp_path: Path) -> None:
    _, config = planned(tmp_path)
    with pytest.raises(ValueError, match=f"there is no strategy `{UNKNOWN}`"):
        replace(config, strategy=UNKNOWN)
    object.__setattr__(config, "strategy", UNKNOWN)  # as if nothing had checked it
    with pytest.raises(ValueError, match=f"there is no strategy `{UNKNOWN}`"):
        strategy_of(None, config, 0, False)  # type: ignore[arg-type]


def test_every_strategy_of_jobs_has_a_class() -> None:
    for name in IN_JOBS:
        module, _, class_name = STRATEGIES[name].worker.partition(":")
        assert callable(getattr(importlib.import_module(module), class_name).of)
        assert strategy_named(name).summary


def test_every_built_in_workload_is_of_a_known_kind() -> None:
    assert {builtin.kind for builtin in BUILTINS.values()} <= JOB_KINDS.keys()
    assert all(workload_kind(name).name == builtin.kind for name, builtin in BUILTINS.items())
    assert all(set(builtin.strategies) <= set(IN_JOBS) for builtin in BUILTINS.values())


NAMES = {*IN_JOBS, *(kind for kind in JOB_KINDS if kind != "program")}
TABLES = {"launcher/strategies.py", "launcher/jobfile/kinds.py", "workloads/registry.py"}


def branches() -> list[str]:
    """Places that compare with a name of a strategy or of a kind of job, or map several of them."""
    sources = (path for folder in ("launcher", "workloads") for path in (ROOT / folder).rglob("*.py"))
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources
        if str(path.relative_to(ROOT)) not in TABLES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.expr | ast.pattern) and _branches(node)
    ]


def _branches(node: ast.AST) -> bool:
    match node:
        case ast.Compare(left=left, comparators=others):
            return any(_is_name(inner) for side in (left, *others) for inner in ast.walk(side))
        case ast.Dict(keys=keys):
            return sum(key is not None and _is_name(key) for key in keys) > 1
        case ast.MatchValue(value=value):
            return _is_name(value)
    return False


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in NAMES


def test_no_branch_over_names_is_left() -> None:
    assert branches() == []
