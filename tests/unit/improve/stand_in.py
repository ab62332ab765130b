"""A search for improvements whose runs are stand-ins with known or drawn times."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from gpurun.launcher.compare.model import Difference, StepTime
from gpurun.launcher.compare.ranking import Differences
from gpurun.launcher.errors import Interrupted, SpecError
from gpurun.launcher.improve.improve import improved
from gpurun.launcher.improve.remedies import TRAINER_OPTIONS
from gpurun.launcher.improve.stages import RemedySearch, Set, pairs_of
from gpurun.launcher.inspect.stacks import file_hash
from gpurun.launcher.jobfile.kinds import PROGRAM
from gpurun.launcher.run.open import Invocation, load_invocation
from gpurun.launcher.rundir.improvement import Improvement
from gpurun.launcher.rundir.records import WORKLOAD, CallSite, Observed
from gpurun.launcher.stats.estimates import Family

FILE = """\
loader = DataLoader(data)
model = DistributedDataParallel(net, find_unused_parameters=True)
optimizer = AdamW(model.parameters())
"""
LOSSES = (2.0, 1.5, 1.25, 1.0, 0.9, 0.8)
LAUNCH_S = 2.5
OTHERS = (2.1, 1.6, 1.3, 1.1, 1.0, 0.9)
WORKERS, UNUSED, FUSED = (
    "DataLoader(num_workers=2, persistent_workers=True)",
    "DistributedDataParallel(find_unused_parameters=False)",
    "AdamW(fused=True)",
)
JOB = "workload: mlp  # ours\ndevices: [cpu:0, cpu:1]\nglobal_batch: 64\nbucket_mb: 1\n"
KEYS = {
    "workers": "0", "bucket_mb": "1", "optimizer": "'default'", "foreach": "None", "fused": "None",
    "precision": "'fp32'", "compile": "False",
}  # fmt: skip


@dataclass
class StandIn:
    """The program: what each remedy changes, by its code."""

    times: Mapping[str, float] = field(default_factory=dict)
    """The time of a step with it, as a factor."""
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    begins: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The losses of the program as it is, in stages with these names."""
    drifts: Mapping[str, float] = field(default_factory=dict)
    """How much more a second launch of the program as it is loses, in stages with these names."""
    seeded: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Where every step has its own seed."""
    fails: Callable[[tuple[str, ...]], bool] = lambda codes: False
    writes: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    library: str = ""
    """Makes its calls."""
    more_calls: tuple[CallSite, ...] = ()
    """Before those of `train.py`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Of a workload, those that have an effect."""
    verdicts: Mapping[str, str] = field(default_factory=dict)
    """In comparisons without this remedy, or (``) with the program as it is, where times don't decide."""
    scatter: float = 1e-9
    """Standard deviation of ln(time) from launch to launch."""
    rng: Random = field(default_factory=lambda: Random(0))
    starts_s: Mapping[str, float] = field(default_factory=dict)
    """What a remedy costs at each start."""
    num_steps: int = 10**6
    saved_s: Mapping[str, float] = field(default_factory=dict)
    """By how much a launch with a remedy is shorter."""
    launch_s: float = LAUNCH_S
    """As long as its first launches let expect."""
    interrupted_at: str = ""
    """The stage in which Ctrl-C comes, when so many sets are measured."""
    measured_before: int = 0
    changed_at: str = ""
    """The stage in which the user's files change."""
    counting_s: float = 0.0
    """How long the launch takes in which its steps are counted."""
    refusals: Mapping[frozenset[str], str] = field(default_factory=dict)
    """Remedies that its job can't have together."""
    skips: tuple[str, ...] = ()
    """Changes that mean nothing to its calls."""
    batches: int | None = None
    """Of an epoch."""
    repeats: str = ""
    drained: Mapping[str, int] = field(default_factory=dict)
    """By the beginning of a stage's name, steps of the 12 last ones that take what workers loaded before."""
    """The dataset whose samples several workers repeat."""
    warns: tuple[str, ...] = ()
    """Remedies with other gradients."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that its job states."""
    hang_timeout_s: float | None = None
    """How long its job lets a launch make no step."""
    cores: int = 2
    limits_s: dict[str, float] = field(default_factory=dict)
    """How long a launch of each stage may take."""
    stages: list[tuple[str, list[tuple[str, ...]]]] = field(default_factory=list)
    spent_s: float = 0.0

    def ms(self, codes: tuple[str, ...]) -> float:
        found = 100.0
        for code in codes:
            found *= self.times.get(code, 1.0)
        return found


class StandInStage:
    """A run of these sets."""

    def __init__(
        self,
        search: "StandInSearch",
        sets: Sequence[Set],
        launches: int,
        steps: int,
        is_seeded: bool,
        hang_s: float,
        name: str = "",
        most_s: float = math.inf,
    ) -> None:
        self.name, self.most_s = name, most_s
        self.steps, self.hang_s = steps, hang_s
        self.program, self.directory, self.is_seeded = search.program, search.directory, is_seeded
        self.sets = [tuple(row.code for row in chosen) for chosen in sets]
        self.rows = sets
        self.code = {path.name: file_hash(path) for path in self.directory.glob("*.py")}
        self.logs = {
            str(position): {
                number: math.log(self.program.ms(codes)) + self.program.rng.gauss(0, self.program.scatter)
                for number in range(launches)
            }
            for position, codes in enumerate(self.sets)
        }
        self.comparison = SimpleNamespace(findings=(), variants=[self.of(i) for i in range(len(sets))])

    def of(self, position: int) -> Any:
        if self.program.fails(self.sets[position]):
            return SimpleNamespace(status="failed", reason="it hung", step_ms=None)
        step_ms = StepTime(math.exp(fmean(self.logs[str(position)].values())))
        ranks = [SimpleNamespace(span_ms=100.0, input_ms=40.0, exposed_transfer_ms=5.0, exposed_wait_ms=0.0)]
        own = self.sets[position]
        if self.most_s < self.program.counting_s:
            return SimpleNamespace(status="timeout", reason="too long", step_ms=None)
        if self.length_s(position) > self.hang_s:
            return SimpleNamespace(status="hung", reason="no step", step_ms=None)
        wall_s = 3.9 + self.steps * (self.program.ms(own) - self.program.ms(())) / 1000
        wall_s += sum(self.program.starts_s.get(code, 0.0) for code in own)
        return SimpleNamespace(
            status="ok", code=self.code, reason=None, step_ms=step_ms, ranks=ranks,
            gradient_warning="its gradients differ" if {*own} & {*self.program.warns} else None,
            wall_s=None if self.program.keys else wall_s,
        )  # fmt: skip

    @property
    def launches_s(self) -> list[float]:
        return [3.9]

    def length_s(self, position: int) -> float:
        costs_s = sum(self.program.starts_s.get(code, 0.0) for code in self.sets[position])
        saved_s = sum(self.program.saved_s.get(code, 0.0) for code in self.sets[position])
        return self.program.launch_s + min(costs_s, self.hang_s) - saved_s

    def num_steps(self, position: int) -> int:
        return min(self.program.num_steps, self.steps) - 1

    @property
    def differences(self) -> dict[tuple[int, int], Difference]:
        differences, pairs = Differences({}, "0", Family(self.logs), {}, "launch"), pairs_of(len(self.sets))
        found = differences.together([(str(a), str(b)) for a, b in pairs])
        return {pair: self._as_stated(*pair, each) for pair, each in zip(pairs, found, strict=True)}

    def _as_stated(self, position: int, other: int, found: Difference) -> Difference:
        left = [code for code in self.sets[other] if code not in self.sets[position]]
        stated = self.program.verdicts.get(left[0] if len(left) == 1 else "")
        return found if stated is None else replace(found, verdict=cast(Any, stated))

    def losses(self, position: int) -> list[tuple[float, ...]]:
        known = self.program.seeded if self.is_seeded else self.program.losses
        own = self.program.begins.get(self.name, LOSSES)
        found = [next((known[code] for code in self.sets[position] if code in known), own)]
        if (drift := self.program.drifts.get(self.name)) and not self.sets[position]:
            found.append(tuple(loss + drift for loss in own))
        return found

    def calls(self, position: int) -> list[CallSite]:
        return list(self.observed(position)[0].calls)

    def observed(self, position: int, rank: int = 0) -> list[Observed]:
        file, batches = str(self.directory / "train.py"), self.program.batches
        epochs = math.ceil(self.steps / (batches or math.inf))
        if self.program.keys:
            return [Observed((CallSite(WORKLOAD, "", 0, True, given=self.program.keys),), LOSSES, "float32")]
        names = {name for row in self.rows[position] for name in row.applied}
        of_stage = (num for name, num in self.program.drained.items() if self.name.startswith(name))
        drained = next(of_stage, 0) if "num_workers" in names else 0
        loader = CallSite("DataLoader", file, 1, True, given={"dataset": "Data"})
        calls = [
            *(replace(each, file=str(self.directory / each.file)) for each in self.program.more_calls),
            replace(loader, repeats=self.program.repeats, batches=batches, epochs=epochs, drained=drained),
            CallSite("DistributedDataParallel", file, 2, True, given={"find_unused_parameters": "True"}),
            CallSite("AdamW", file, 3, True, given={"params": "parameters"}),
        ]
        applied = dict.fromkeys(names - {*self.program.skips}, 1)
        library = self.program.library
        calls = [replace(each, applied=applied, library=library, is_users=not library) for each in calls]
        options = tuple(TRAINER_OPTIONS.values()) if library == "transformers" else ()
        return [
            Observed(
                tuple(calls), LOSSES, "float32", steps=22, writes=self.program.writes, trainer_options=options
            )
        ]


@dataclass
class StandInPart:
    """A stage of which the first sets are measured."""

    stage: StandInStage
    num: int

    def of(self, position: int) -> Any:
        return self.stage.of(position) if position < self.num else SimpleNamespace(status="skipped")


class StandInSearch(RemedySearch):
    """Its stages take no time but that of their launches."""

    program: StandIn
    directory: Path

    def refusal(self, chosen: Set) -> str:
        codes = {row.code for row in chosen}
        return next((why for refused, why in self.program.refusals.items() if refused <= codes), "")

    def stage(self, name: str, sets: Sequence[Set], *overrides: str, **how: Any) -> Any:
        words = re.findall(r"launches: (\d+), (?:limit|rounds): (\d+)", " ".join(overrides))
        launches, steps = map(int, words[0])
        assert not (self.program.keys and "limit" in " ".join(overrides)), "a workload has rounds"
        hang_s = min(how.get("hang_s", math.inf), self.hang_s)
        most_s = how.get("most_s", math.inf)
        found = StandInStage(self, sets, launches, steps, how.get("seeds_steps", False), hang_s, name, most_s)
        self.program.stages.append((name, found.sets))
        self.program.limits_s[name] = most_s
        if name == self.program.changed_at:
            raise SpecError("train.py changed while train.py ran")
        if name == self.program.interrupted_at:
            self.interrupted = cast(Any, StandInPart(found, self.program.measured_before))
            raise Interrupted
        took_s = launches * sum(found.length_s(position) for position in range(len(sets)))
        self.spent_s = self.program.spent_s = self.spent_s + took_s
        self.launch_s = None if name.startswith("1") else self.program.launch_s
        return found


def searched(program: StandIn, directory: Path, budget_s: float = 600.0, **how: Any) -> Improvement:
    """What a search finds in a directory of its own; `how` as `found_by` takes it."""
    (directory / "train.py").write_text(FILE)
    steps = SimpleNamespace(warmup=3)
    spec = SimpleNamespace(
        program="train.py", args=program.args, stated=(), env=program.env, steps=steps,
        kind=PROGRAM, hang_timeout_s=program.hang_timeout_s, limit_s=math.inf,
    )  # fmt: skip
    given = Invocation(directory / "job.yaml", ())
    return found_by(program, directory, spec, given, budget_s, **how)


def searched_job(program: StandIn, directory: Path, *overrides: str, numerics: bool = False) -> Improvement:
    """What a search finds for the workload of a job file, of which the keys `KEYS` have an effect."""
    (directory / "job.yaml").write_text(JOB)
    (directory / "train.py").touch()
    given = Invocation(directory / "job.yaml", overrides)
    program, spec = replace(program, keys=KEYS), load_invocation(given)
    return found_by(program, directory, spec, given, numerics=numerics)


def found_by(
    program: StandIn,
    directory: Path,
    spec: Any,
    given: Invocation,
    budget_s: float = 600.0,
    allows: bool = False,
    numerics: bool = False,
    keep: Callable[[Improvement], object] = lambda now: None,
) -> Improvement:
    search = StandInSearch.__new__(StandInSearch)
    vars(search).update(
        program=program, directory=directory, given=given, spec=spec, path=directory / "found",
        machine=SimpleNamespace(cpu_cores=program.cores, free_cores=None, gpus=()), budget_s=budget_s,
        spent_s=0.0, say=lambda text: None, launch_s=None, first_s=3.9, numerics=numerics,
        allows_other_random_numbers=allows, saved_s=dict(program.saved_s),
    )  # fmt: skip
    module = "gpurun.launcher.improve.improve"
    with mock.patch(f"{module}.job_devices", return_value=("cpu:0", "cpu:1")):
        return improved(search, Improvement(1, search.name, budget_s), lambda now: (keep(now), now)[1])
