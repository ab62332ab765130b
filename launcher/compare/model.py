"""`Comparison`: the one object that every report renders, and the schema of `comparison.json`.

What does not apply is `None` (`null`), never 0. Schema version 3.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gpurun.launcher.compare.figures.ranks import ExposedComm, RankFigures, TracedSteps
from gpurun.launcher.compare.figures.recorded import Rates
from gpurun.launcher.compare.figures.searched import SearchResult
from gpurun.launcher.compare.figures.size_curves import Balanced, BatchCurve, ProbeResult
from gpurun.launcher.findings.finding import Finding, of_level
from gpurun.launcher.findings.finding_kinds import KINDS
from gpurun.launcher.plan.model import (
    NAMES,
    Identity,
    Metric,
    refuse_unknown_names,
    refuse_unknown_names_in_job,
)
from gpurun.launcher.rundir.records import Checked, CodeVersion, Resumption, Status
from gpurun.launcher.stats.estimates import Bounded, Outcome
from gpurun.launcher.units import Interval

Verdict = Literal["baseline", "faster", "slower", "same", "inconclusive"]
Unit = Literal["launch", "round"]
"""The unit of an interval: launches, whose scatter it covers, or the rounds of those that there were."""


@dataclass(frozen=True)
class StepTime:
    """Milliseconds per optimizer step, with its 95 % interval, over launches where there are several.

    The baseline's: geometric mean over launches of a robust mean over rounds. Of the others: that, times the
    ratio that they are compared by. It is the estimate in `comparison.json`, not the `RoundTime`s behind it.
    """

    estimate: float = math.nan
    """In files of schema 1, whose figures aren't shown, it was called `median`."""
    ci: Interval | None = None


@dataclass(frozen=True)
class Difference:
    """100·(t / t_baseline − 1), in percent: positive is slower.

    t is the time of a step, or, where the global batches differ, of a sample.
    """

    percent: float | None
    ci: Interval | None
    verdict: Verdict
    why: str | None = None
    """Why it is inconclusive, where that is known: what is missing, or which round contradicts all others."""
    wins: int | None = None
    """In how many pairs of launches, or of rounds, the difference has the sign of `percent`."""
    of: int | None = None
    """The number of pairs."""
    without_load: "WithoutLoad | None" = None
    """The difference on the same machine without other load; `None` where nothing is compared."""


Holds = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class WithoutLoad:
    """The difference of times less the waiting for cores that other load had."""

    percent: float | None = None
    ci: Interval | None = None
    """Interval at 95 %, over every share of the waiting that may be owed to other load."""
    holds: Holds = "unknown"
    """Whether `ci` excludes 0 on the same side: `yes`; on the other, or it lies within ±1 %: `no`. Else, and
    where waiting isn't known, a rank is on another node, or a GPU computes: `unknown`."""


@dataclass(frozen=True)
class Noise:
    """The baseline measured twice in the same rounds: what differs is noise."""

    aa_percent: float | None = None
    ci: Interval | None = None
    launch_scatter_percent: float | None = None
    """Standard deviation of the baseline's step between launches, less what rounds explain; at least 0."""
    round_scatter_percent: float | None = None
    """Between the rounds of a launch."""


@dataclass(frozen=True)
class Scatter:
    """Standard deviations of the difference between two variants, in percent: the median over variants."""

    launch_percent: float | None = None
    """Between launches that both ran in, without what rounds add."""
    round_percent: float | None = None
    """Between the rounds of a launch."""
    shared_percent: float | None = None
    """The scatter of a launch's value, where both ran in the same launches: both of the above."""
    apart_percent: float | None = None
    """The scatter of a launch's value, where they ran in launches of their own."""


@dataclass(frozen=True)
class OpenPair:
    """A variant of which it isn't known whether the leader is faster."""

    variant: str
    percent: float | None
    """How far it is behind the leader."""
    ci: Interval | None
    launches: int | None
    """In all, until a difference of that size is decided with 80 % chance; `None`: it can't be said."""


@dataclass(frozen=True)
class VariantResult(Checked, Identity, Rates):
    """One variant's figures and how it ended.

    It is a part of `comparison.json`, so it has none of the steps that a `MeasuredVariant` holds.
    """

    status: Status
    reason: str | None
    log: str | None
    rounds: int
    launches: int
    step_ms: StepTime | None
    vs_baseline: Difference | None
    scaling_efficiency: float | None
    exposed_comm_ms: ExposedComm
    ranks: tuple[RankFigures, ...]
    launch_ms: tuple[float, ...] = ()
    """Step of each launch, by repetition: what two runs are compared by."""
    balanced: Balanced | None = None
    """`None` for every split that the job names by itself."""
    probe: ProbeResult | None = None
    """The result of a micro-benchmark, which has no steps."""
    wall_s: float | None = None
    """How long a program runs, from its start to the end of its last rank: median over launches."""
    compression: str = ""
    """How its gradients are compressed, so that they aren't those of one device; empty where they aren't."""
    traced_steps: TracedSteps | None = None
    """`None` where nothing was traced, and in older runs."""

    def __post_init__(self) -> None:
        """Refuses names that no table has, in a comparison that is read back too."""
        refuse_unknown_names({key: getattr(self, key) for key in NAMES if hasattr(self, key)})

    @property
    def peak_gib(self) -> float | None:
        """The highest peak of all ranks."""
        return max((rank.peak_gib for rank in self.ranks if rank.peak_gib is not None), default=None)

    def without_figures(self) -> "VariantResult":
        """The variant's identity and how it ended."""
        return replace(
            self,
            **asdict(Rates()),
            **asdict(Checked(code=self.code)),
            step_ms=None,
            vs_baseline=None,
            scaling_efficiency=None,
            exposed_comm_ms=ExposedComm(),
            ranks=(),
            launch_ms=(),
            balanced=None,
            probe=None,
            wall_s=None,
            traced_steps=None,
        )


@dataclass(frozen=True, kw_only=True)
class GateRow(Bounded):
    """One variant before (A) and after (B). Percent of B against A: positive is slower."""

    label: str
    a: str
    """The variant's id before, in its run."""
    b: str
    """The id afterwards, in its run."""
    a_ms: float | None
    b_ms: float | None
    launches: int
    """How often each version was launched."""
    why: str | None = None
    """Why nothing can be said, where it isn't the scatter of its launches."""
    is_open: bool = False
    """Whether more launches may decide it."""


IN_RUN_A = "in run A"
"""The origin of A in a gate over two past runs."""


@dataclass(frozen=True)
class Gate:
    """The result of a gate."""

    threshold_percent: float
    outcome: Outcome
    """`slower` if one variant is; `not slower` if none is, beyond doubt."""
    before: str
    """The origin of A, as a sentence names it: `at main`, `in ./old`, `in run A`."""
    rows: tuple[GateRow, ...]
    metric: Metric = "wall"

    def of(self, outcome: Outcome) -> list[GateRow]:
        """The variants with this outcome."""
        return [row for row in self.rows if row.outcome == outcome]


@dataclass(frozen=True)
class Fitting:
    """Which variants fit in the memory that the job states."""

    memory_gib: float
    fastest: str | None
    """The fastest of those that fit, however sure its lead is; `None`: none fits."""
    variants: tuple[str, ...]
    """All that fit, fastest first."""


CONCLUSIONS = 41
"""Version of what follows from the files of a run; raised where they now give other figures or sentences."""


@dataclass(frozen=True)
class Comparison:
    """All that a run found out; renders without a GPU and without rerunning anything."""

    schema: int
    name: str
    job: Mapping[str, Any]
    host: Mapping[str, Any]
    baseline: str
    ci_level: float | None
    """Confidence of all verdicts on the table together."""
    noise: Noise
    variants: tuple[VariantResult, ...]
    fastest: str | None
    """The variant that the answer names as the fastest; `None` where it names none."""
    complete: bool
    """Whether all that was planned has been run."""
    findings: tuple[Finding, ...] = ()
    """The answer, then dangers, causes and remedies by what they concern, and details; none in files of
    schema 2 and below."""
    batch_curves: tuple[BatchCurve, ...] = ()
    """The curves over global batches, where at least three were compared."""
    restarts: int = 0
    """How often launches were started again after a failure."""
    resumed: Resumption | None = None
    """The parts that the newest command kept and measured again; `None`: it didn't resume the run."""
    unit: Unit = "round"
    """The unit of its intervals."""
    leader: str | None = None
    """The variant with the highest throughput (of programs: the shortest step), however sure its lead is."""
    open: tuple[OpenPair, ...] = ()
    """The differences that more launches would have to decide, the closest first."""
    scatter: Scatter = Scatter()
    code: CodeVersion | None = None
    """The commit that the run was started from; `None` outside of git, and in older runs."""
    fitting: Fitting | None = None
    """The variants that fit in `memory`, where the job states it."""
    measured_s: float | None = None
    """Seconds that its launches took, with the time between them."""
    search: SearchResult | None = None
    """The search of `gpurun tune`; `None` of other runs."""
    gate: Gate | None = None
    """The answer of `gpurun gate`; `None` of other runs."""
    conclusions: int = 0
    """`CONCLUSIONS` of the gpurun that compared; 0 in runs that are older than this field."""

    def __post_init__(self) -> None:
        """Refuses names that no table has, in a comparison that is read back too."""
        refuse_unknown_names_in_job(self.job)
        known = (each.code in KINDS and KINDS[each.code].has_case(each.figures) for each in self.findings)
        if self.is_current and not all(known):  # another gpurun has other kinds
            raise ValueError("it has a finding of no kind")

    @property
    def is_current(self) -> bool:
        """Whether this gpurun would conclude the same from the files of the run."""
        return self.conclusions == CONCLUSIONS

    def without_figures(self) -> "Comparison":
        """The compared variants and how they ended; nothing that was measured or concluded."""
        return replace(
            self,
            variants=tuple(variant.without_figures() for variant in self.variants),
            noise=Noise(None, None, None),
            scatter=Scatter(),
            ci_level=None,
            fastest=None,
            leader=None,
            findings=(),
            batch_curves=(),
            open=(),
            fitting=None,
            search=None,
            gate=None,
        )

    @property
    def answer(self) -> Finding | None:
        """The answer to the question of the run; `None` in files of another version."""
        return next(iter(of_level(self.findings, "answer")), None)

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        return self.answer.headline if self.answer else ""

    @property
    def summary(self) -> str:
        """The answer, its reasons and what to do next: a sentence in each line."""
        others = of_level(self.findings, "cause", "remedy")
        return "\n".join((self.headline, *(each.sentence for each in others)))

    def about(self, variant: str) -> tuple[Finding, ...]:
        """The findings about a variant."""
        return tuple(each for each in self.findings if variant in each.about)

    @property
    def is_unranked(self) -> bool:
        """Whether what was measured can't be ranked, since clocks were throttled."""
        return self.answer is not None and self.answer.code == "not-ranked"
