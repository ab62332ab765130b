"""The result of `gpurun improve`: the change, and the outcome of each remedy; `improve.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpurun.launcher.units import Interval

RemedyVerdict = Literal[
    "kept", "same", "slower", "undecided", "failed", "changes numerics", "other random numbers", "not tried"
]
SCHEMA = 1
CHANGES_NUMERICS = "changes numerics: --numerics tries it"
NO_TIME = "the budget has no time for it"
"""Why a remedy isn't tried, or not compared."""
BEFORE_EPOCH_ENDS = "in its first {} steps, before an epoch ends"
"""What a gain in reading data is limited to, where its launches had no more."""
YOURS = "write it yourself"
"""How a note begins about a change that no file takes by itself."""
NO_GAIN = "no gain in its trials"
BEGINS_OTHERWISE = "two runs as it is begin with other losses"
BEGIN_ALIKE = (
    "make runs of {} begin with the same loss, by seeds that don't change and without an earlier checkpoint, "
    "and begin again"
)
LOADED_BEFORE = "its steps took batches that were loaded before them"
NEVER_COMPARED = (NO_GAIN, BEGINS_OTHERWISE, LOADED_BEFORE)
"""Why it isn't compared, whatever the budget."""


@dataclass(frozen=True)
class Gain:
    """Percent of the time of a step: negative is faster."""

    percent: float
    ci: Interval | None = None


@dataclass(frozen=True)
class RemedyResult:
    """The outcome of a remedy."""

    code: str
    """The change as one would write it."""
    applied_to: str
    """The changed place: `DataLoader`, `env`, a key of the job."""
    place: str
    """`train.py:41`, or all calls that are changed: `train.py:41, 44, data.py:7`; empty where it is at
    no call."""
    verdict: RemedyVerdict
    percent: float | None = None
    """The change of a step's time: of what is kept, against the kept changes without it; without an interval
    in trials, of which nothing is claimed."""
    ci: Interval | None = None
    why: str = ""
    start_s: float | None = None
    """Seconds that it costs at each start, where that is noticed."""
    pays_from_steps: int | None = None
    """From how many steps on it gains more than that."""


@dataclass(frozen=True)
class Advice:
    """A change that only the program's author can make; it is neither tried nor counted."""

    place: str
    """`train.py:41`."""
    text: str


@dataclass(frozen=True)
class CallChange:
    """Other arguments for a call."""

    file: str
    """Relative to the directory of the job."""
    line: int
    """As the frame reports it while the call runs (`f_lineno`), from 1."""
    call: str
    """The last part of the called name, before any renaming by an import: 'DistributedDataParallel'."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Written with `repr`; an argument that the call has is replaced, others are appended."""
    parameters: tuple[str, ...] = ()
    """Names of the positional parameters of what is called, in order, without `self`."""
    before: str = ""
    """A statement for a line before that of the call; `{0}` is the call's first argument, a (dotted) name."""
    after: str = ""
    """Statements for lines after that of the call, where there is no `before` or no place for it; `{0}` is
    the name that the result of the call gets."""
    end_column: int | None = None
    """Bytes of the call's last line up to its end: which call it is, where a line has several."""


@dataclass(frozen=True)
class Improvement:
    """All that a search for improvements has found."""

    schema: int
    name: str
    """The program, as the command line has it, or the name of a workload's job file."""
    budget_s: float
    gain: Gain | None = None
    """The kept changes against the program as it is, on launches that took part in no choice; `None`: nothing
    is kept."""
    remedies: tuple[RemedyResult, ...] = ()
    why: str = ""
    """Where the time of the program's steps goes."""
    then: str = ""
    """Where the time goes with the kept changes."""
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    needs_s: float | None = None
    """The budget that would have left time to prove something."""
    first_steps: int | None = None
    """The steps that the gain is of, where it is one in reading data and no epoch ended in them."""
    changes: tuple[CallChange, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to start the program with."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options for the program's command line, by name, of which a library makes the changes."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a workload's job file, which is `name`, with their new values; `None`: to be removed."""
    code: Mapping[str, str] = field(default_factory=dict)
    """The files to change, with a hash of each as it was measured."""
    diff: str = ""
    """For `git apply`. Bytes that aren't UTF-8 are U+FFFD here, and as they are in `change.diff`."""
    numerics: bool = False
    """Whether what changes numerics was tried, too."""
    other_random_numbers: bool = False
    """Whether what draws random numbers in another order may be kept."""
    spent_s: float = 0.0
    """Seconds of the budget that are spent, in all commands that worked on it."""
    ends_s: Mapping[str, float] = field(default_factory=dict)
    """The same when each stage ended, by its name: a search that is resumed decides as before."""
    changed: tuple[str, ...] = ()
    """Files of the job's directory that its first launches changed, though no rank was seen to write them."""
    written: bool = False
    """Whether the change has been applied to the files."""
    written_code: Mapping[str, str | None] = field(default_factory=dict)
    """Hashes of the files in `code`, as the change has left them."""
    complete: bool = False

    @property
    def kept(self) -> list[RemedyResult]:
        return [each for each in self.remedies if each.verdict == "kept"]

    @property
    def is_open(self) -> bool:
        """Whether more time may prove something."""
        has_no_time = any(NO_TIME in each.why for each in self.remedies)
        return has_no_time or any(
            each.verdict == "undecided" and each.why not in NEVER_COMPARED for each in self.tried
        )

    @property
    def tried(self) -> list[RemedyResult]:
        return [each for each in self.remedies if each.verdict != "not tried"]

    @property
    def untried(self) -> dict[str, list[RemedyResult]]:
        """Remedies that weren't tried, by the reason; empty: they haven't been yet."""
        found: dict[str, list[RemedyResult]] = {}
        for each in self.remedies:
            if each.verdict == "not tried":
                found.setdefault(each.why, []).append(each)
        return found
