"""A search from its job to its files, with trials that are made up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.figures.searched import effects_note, search_result, winner_findings
from gpurun.launcher.errors import Interrupted, SpecError
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.machine.host import Machine
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Variant
from gpurun.launcher.run.job import Finished, attended
from gpurun.launcher.run.open import run_to_resume
from gpurun.launcher.run.progress_line import Progress
from gpurun.launcher.rundir import store
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.paths import Url
from gpurun.launcher.rundir.records import TimeChange, TrialRecord
from gpurun.launcher.rundir.store import Store, fetched, keep_at
from gpurun.launcher.search.space import Space, build_space, keys_of, levels_of
from gpurun.launcher.search.tune import Screening, Trials, Tuning, finals, interrupted, job_to_tune, resumed
from tests.known import known
from tests.unit.plan.machines import FakeMachine
from tests.wording import Wording

JOB = """
    name: search
    workload: gpt
    devices: cpu:2
    global_batch: 64
    bucket_mb: 10
    compare:
      strategy: [ddp, zero1, single]
      split: [even, "3:1"]
      bucket_mb: [1, 5, 25]
      gradient_as_bucket_view: [false, true]
"""
STEP_MS = {"ddp": 10.0, "zero1": 12.0, "single": 30.0}


@dataclass
class FakeTrials:
    """Knows what a variant takes, and who has been tried."""

    space: Space
    outcome: Callable[[Variant], Mapping[str, Any]]
    tried: list[str] = field(default_factory=list)

    def run(self, variant: str, number: int) -> TrialRecord:
        self.tried.append(variant)
        found = self.outcome(self.space.plan.variant(variant))
        return replace(TrialRecord(variant, number, "ok", 1.0, variance=1e-5), **found)


def step_ms(variant: Variant) -> Mapping[str, Any]:
    view = 0.9 if variant.gradient_as_bucket_view else 1.0
    return {"step_ms": STEP_MS[variant.strategy] * view * (1.3 if variant.split_name == "3:1" else 1.0)}


def tuning_of(directory: Path, job: str = JOB, budget_s: float = 1e6) -> Tuning:
    spec = job_to_tune(load_text(job, "", (), directory))
    machine = cast("Machine", FakeMachine())
    space = build_space(spec, machine)
    run = RunDir(directory / "run")
    write_json(run.plan, build_plan(spec, machine, chosen=(space.variants[space.own].id,)))
    write_json(run.spec, spec.resolved())
    return Tuning(spec, machine, space, run, directory, budget_s)


def screening_of(tuning: Tuning) -> Screening:
    class Silent:
        is_live = False

    return Screening(tuning, cast("Progress", Silent()), lambda text: None)


def searched(tuning: Tuning, outcome: Callable[[Variant], Mapping[str, Any]] = step_ms) -> FakeTrials:
    trials = FakeTrials(tuning.space, outcome)
    screening = screening_of(tuning)
    screening.run(cast("Trials", trials))
    screening.conclude(is_over=True)
    return trials


def test_a_search_is_copied_to_a_store_as_it_grows_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "EVERY_S", 0.01)
    tuning, url = tuning_of(tmp_path), Url(f"memory://bucket/{tmp_path.name}")
    keep_at(tuning.run.path, url)

    def work(progress: Progress) -> Finished:
        searched(tuning)
        assert tuning.run.running.exists()
        while "trials.jsonl" not in Store(url).versions():
            assert capsys.readouterr().err == ""
        return interrupted(tuning.run, Interrupted("SIGTERM"))

    finished = attended(tuning.run, work)
    assert isinstance(finished.error, Interrupted)
    assert capsys.readouterr().err == f"the run is also at {url}\n"
    copy = resumed(RunDir(fetched(url)), tuning.space)
    assert (copy.read_search(), copy.read_trials()) == (tuning.run.read_search(), tuning.run.read_trials())
    assert copy.comparison.read_bytes() == tuning.run.comparison.read_bytes()
    with pytest.raises(SpecError, match=f"{url} is a search; to continue it: gpurun tune --resume {url}"):
        run_to_resume(copy.path, tuning.space.plan)


def test_a_space_has_the_jobs_own_setting_and_ranks_for_what_they_can_share(tmp_path: Path) -> None:
    space = tuning_of(tmp_path).space
    assert space.num_combinations == 36
    own = space.variants[space.own]
    assert (own.strategy, own.bucket_mb, own.split_name) == ("ddp", 10, "even")
    assert len(space.variants) == 2 * 2 * 3 * 2 + 1 + 1  # ddp and zero1, single, the job's own
    assert [
        {space.plan.variant(each).strategy for each in launch.variants} for launch in space.plan.launches
    ] == [
        {"ddp", "zero1"},
        {"single"},
    ]
    levels = levels_of(space.variants)
    assert len({tuple(row) for row in levels.tolist()}) == len(space.variants)


def groups_of(space: Space) -> set[str]:
    return {launch.group for launch in space.plan.launches}


def test_threads_and_devices_need_new_ranks_and_a_program_its_own(tmp_path: Path) -> None:
    job = "workload: gpt\ndevices: cpu:2\nglobal_batch: 8\n"
    job += "compare: {threads: [1, 2], device_count: [1, 2], accumulate: [1, 2]}"
    assert len(groups_of(tuning_of(tmp_path, job).space)) == 4  # the job's own are two of them
    (tmp_path / "train.py").write_text("")
    job = (
        "script: train.py\ndevices: cpu:2\ncompare: {args: [[--a, 1, --b], [--a, 2]], env: [{X: 1}, {X: 2}]}"
    )
    space = tuning_of(tmp_path / "other", job.replace("train.py", str(tmp_path / "train.py"))).space
    variants = space.variants
    assert len(groups_of(space)) == len(variants) == 5
    assert levels_of(variants).shape == (5, 3)  # --a, --b, X
    assert keys_of(variants)[0].values == ("1", "1", "2", "2", "not given")


@pytest.fixture
def tuning(tmp_path: Path) -> Tuning:
    return tuning_of(tmp_path)


def test_a_search_finds_the_fastest_and_says_what_it_left_out(tuning: Tuning) -> None:
    trials = searched(tuning)
    record = known(tuning.run.read_search())
    own = tuning.space.variants[tuning.space.own].id
    assert {step_ms(tuning.space.plan.variant(each))["step_ms"] for each in record.finalists[:1]} == {9.0}
    assert own in record.finalists
    assert len(record.finalists) <= 6
    assert len(set(trials.tried)) + len(record.left_out) == len(tuning.space.variants)
    assert all("slower than the best that was" in combination.reason for combination in record.left_out)
    ready = finals(tuning, record)
    assert {variant.id for variant in ready.plan.variants} == set(record.finalists)
    assert ready.plan.baseline == own
    spent_s = sum(each.seconds for each in tuning.run.read_trials())
    assert ready.spec.budget_s == pytest.approx(tuning.budget_s - spent_s)
    search = known(compare_run(tuning.run).search)
    assert (search.best, search.is_over, search.tried) == (record.finalists[0], True, len(set(trials.tried)))
    assert f"tried {search.tried} of 26 different combinations" in search.summary


def test_two_fifths_of_the_budget_are_for_the_comparison_however_long_trials_took(tuning: Tuning) -> None:
    searched(tuning)
    trial = tuning.run.read_trials()[0]
    append_lines(tuning.run.trials, [replace(trial, seconds=0.9 * tuning.budget_s)])
    ready = finals(tuning, known(tuning.run.read_search()))
    assert ready.spec.budget_s == pytest.approx(0.4 * tuning.budget_s)


def test_a_search_says_what_each_value_does_to_the_time(tuning: Tuning, wording: Wording) -> None:
    searched(tuning)
    search = known(compare_run(tuning.run).search)
    best = tuning.space.plan.variant(known(search.best))
    assert best.gradient_as_bucket_view
    buckets = [size_mb for size_mb in (1, 5, 10, 25) if size_mb != best.bucket_mb]
    found = {f"{effect.key}={effect.value} instead of {effect.against}": effect for effect in search.effects}
    assert {*found} == {
        "split=3:1 instead of even",
        "strategy=zero1 instead of ddp",
        "strategy=single instead of ddp",
        *(f"bucket_mb={size_mb} instead of {best.bucket_mb}" for size_mb in buckets),
        "gradient_as_bucket_view=false instead of true",
    }
    averages = [known(effect.average) for effect in found.values()]
    expected = [30, 20, 178, 0, 0, 0, 11]  # `single` next to all splits of ddp
    assert [average.percent for average in averages] == pytest.approx(expected, abs=4)
    assert all(known(average.ci)[0] <= average.percent <= known(average.ci)[1] for average in averages)
    tried = {combination.variant: known(combination.step_ms) for combination in search.combinations}
    measured = {text: effect.at_best for text, effect in found.items() if effect.at_best}
    assert "strategy=single instead of ddp" in measured
    for change in measured.values():
        assert change.percent == pytest.approx(100 * (tried[known(change.variant)] / tried[best.id] - 1))
        assert known(change.ci)[0] < change.percent < known(change.ci)[1]
    (note,) = effects_note(search)
    wording(note.text, hide=r"[+−]\d.*?\)")


def test_an_effect_at_the_best_may_be_the_opposite_of_the_average(tmp_path: Path, wording: Wording) -> None:
    """With two threads everything is slow, and `ddp` slower than `dp`; the best has one thread."""
    job = "workload: gpt\ndevices: cpu:2\nglobal_batch: 8\n"
    tuning = tuning_of(tmp_path, f"{job}compare: {{strategy: [ddp, dp], threads: [1, 2, 3]}}")

    def outcome(variant: Variant) -> Mapping[str, Any]:
        ms = {"ddp": (10.0, 90.0, 90.0), "dp": (14.0, 30.0, 30.0)}
        return {"step_ms": ms[variant.strategy][variant.threads - 1]}

    searched(tuning, outcome)
    search = known(compare_run(tuning.run).search)
    of_dp = next(effect for effect in search.effects if effect.value == "dp")
    assert known(of_dp.at_best).percent == pytest.approx(40.0)
    assert known(of_dp.average).percent < -20
    wording(*(each.text for each in effects_note(search)), hide=r"[+−]\d.*?\)")


@pytest.mark.parametrize(
    ("own", "values", "best", "set_to"),
    [
        (
            "gradient_as_bucket_view: false",
            "[false, true]",
            "true",
            "`gradient_as_bucket_view: true`",
        ),
        ("split: even", "[even, '3:1']", "3:1", '`split: "3:1"`'),
        ("params: {width: 64}", "[{width: 64}, {width: 128}]", "128", "`params: {width: 128}`"),
    ],
)
def test_the_values_of_the_best_are_given_as_the_job_file_takes_them(
    tmp_path: Path, own: str, values: str, best: str, set_to: str
) -> None:
    key = own.partition(":")[0]
    job = f"workload: gpt\ndevices: cpu:2\nglobal_batch: 8\n{own}\n"
    tuning = tuning_of(tmp_path, f"{job}compare: {{strategy: [ddp, zero1], {key}: {values}}}")
    keys = {each.setting: each for each in keys_of(tuning.space.variants)}
    texts = map(keys[key].text, keys[key].levels)
    shown = dict(zip((each.id for each in tuning.space.variants), texts, strict=True))

    def outcome(variant: Variant) -> Mapping[str, Any]:
        return {"step_ms": (10.0 if shown[variant.id] == best else 20.0) * (1 + (variant.strategy == "ddp"))}

    searched(tuning, outcome)
    search = known(compare_run(tuning.run).search)
    costs, use_it = winner_findings(search, is_settled=True)
    assert sorted(use_it.figures["settings"]) == sorted(("`strategy: zero1`", set_to))
    assert costs.figures["percent"] == pytest.approx(100)


def test_of_several_parts_of_a_setting_what_costs_most_is_named(tmp_path: Path) -> None:
    values = ", ".join(f"{{width: {width}, layers: {layers}}}" for width in (64, 128) for layers in (1, 2))
    job = "workload: gpt\ndevices: cpu:2\nglobal_batch: 8\nparams: {width: 64, layers: 1}\n"
    tuning = tuning_of(tmp_path, f"{job}compare: {{params: [{values}]}}")

    def outcome(variant: Variant) -> Mapping[str, Any]:
        return {"step_ms": 60.0 / (1 + (variant.params["width"] == 128)) / variant.params["layers"]}

    searched(tuning, outcome)
    search = known(compare_run(tuning.run).search)
    costs, use_it = winner_findings(search, is_settled=True)
    assert use_it.figures["settings"] == ["`params: {width: 128, layers: 2}`"]
    assert costs.figures["key"] in ("params width", "params layers")
    assert costs.figures["percent"] == pytest.approx(100)


def test_where_the_best_was_compared_the_effect_is_that_of_the_comparison(tuning: Tuning) -> None:
    searched(tuning)
    record = known(tuning.run.read_search())
    best, other = next(
        (best, known(effect.at_best).variant)
        for best in record.finalists
        for effect in record.effects_at[best]
        if effect.at_best and effect.at_best.variant in record.finalists
    )
    found = search_result(tuning.run, best, None, {known(other): TimeChange(40.0, (38.0, 42.0), other)})
    changes = [effect.at_best for effect in known(found).effects if effect.at_best]
    assert {change.percent for change in changes if change.variant == other} == {40.0}
    assert all(change.percent != 40.0 for change in changes if change.variant != other)


def test_what_is_compared_is_the_fastest_by_the_trials(
    tuning: Tuning, tmp_path: Path, wording: Wording
) -> None:
    searched(tuning)
    search = known(compare_run(tuning.run).search)
    fastest = sorted(search.combinations, key=lambda combination: known(combination.step_ms))[:5]
    assert search.finalists == tuple(dict.fromkeys((*(each.variant for each in fastest), search.own)))
    few = tuning_of(tmp_path / "few", JOB.replace("[1, 5, 25]", "[1]").replace('[even, "3:1"]', "[even]"))
    searched(
        few, lambda each: step_ms(each) if each.strategy == "ddp" else {"status": "failed", "reason": "no"}
    )
    wording(search.summary, known(compare_run(few.run).search).summary)


def test_a_search_that_was_interrupted_goes_on(tuning: Tuning, tmp_path: Path, wording: Wording) -> None:

    def interrupted(variant: Variant) -> Mapping[str, Any]:
        if len(tuning.run.read_trials()) == 3:
            raise Interrupted("interrupted by Ctrl-C")
        return step_ms(variant)

    with pytest.raises(Interrupted):
        searched(tuning, interrupted)
    comparison = compare_run(tuning.run)
    assert comparison.search is not None
    wording(comparison.search.summary)
    assert not comparison.complete
    again = searched(replace(tuning, run=resumed(tuning.run, tuning.space)))
    first = [trial.variant for trial in tuning.run.read_trials()[:3]]
    assert not set(first) & set(again.tried[:5])
    with pytest.raises(SpecError, match="made from another job"):
        resumed(tuning.run, tuning_of(tmp_path / "other", JOB.replace("[1, 5, 25]", "[1, 5]")).space)


def test_what_fails_or_does_not_fit_is_a_result(tmp_path: Path, wording: Wording) -> None:
    tuning = tuning_of(tmp_path, JOB + "    memory: 1 GiB\n")

    def outcome(variant: Variant) -> Mapping[str, Any]:
        if variant.strategy == "zero1":
            return {"status": "failed", "reason": "rank 0 raised ValueError"}
        return {**step_ms(variant), "peak_gib": 2.0 if variant.gradient_as_bucket_view else 0.5}

    searched(tuning, outcome)
    record = known(tuning.run.read_search())
    wording({failure.reason for failure in record.failed})
    search = known(compare_run(tuning.run).search)
    assert {combination.status for combination in search.combinations} == {"ok", "failed", "too large"}
    (leader,) = search.front  # all that fit are as large
    assert {each.peak_gib for each in search.combinations if each.variant == leader} == {0.5}
    assert not {effect.key for effect in search.effects if "zero1" in (effect.value, effect.against)}
    best = [tuning.space.plan.variant(finalist) for finalist in record.finalists]
    assert not any(variant.strategy == "zero1" or variant.gradient_as_bucket_view for variant in best)


def test_nothing_that_could_be_measured_is_a_mistake(tmp_path: Path, wording: Wording) -> None:
    with wording.raises(SpecError):
        searched(tuning_of(tmp_path), lambda variant: {"status": "failed", "reason": "it broke"})


@pytest.mark.parametrize(
    "job",
    [
        "workload: gpt\nglobal_batch: max\ncompare: {bucket_mb: [1, 5]}",
        "workload: gpt\nglobal_batch: 8\nnodes: 2\ncompare: {bucket_mb: [1, 5]}",
        "workload: matmul\ncompare: {precision: [fp32, bf16]}",
        "workload: gpt\nglobal_batch: 8",
    ],
)
def test_jobs_that_cannot_be_searched(tmp_path: Path, job: str, wording: Wording) -> None:
    with wording.raises(SpecError):
        tuning_of(tmp_path, f"devices: cpu:2\n{job}")
