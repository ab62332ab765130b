"""Does `gpurun improve` find a loss that was planted in a program or workload, and nothing where none is?

`python -m benchmarks improve [DIRECTORY] [--only CELL …] [--minutes M]` runs the searches that
DIRECTORY lacks, at most for M minutes, and writes the section "Improve". It can be interrupted and repeated.
With another `--seed` it draws others, to build with, and writes no section.

Where a planted loss was found, the change is written, and its true gain measured in other runs.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.timing import machine_facts, record, table
from benchmarks.verdicts.true_gain import (
    CLOCK,
    Side,
    TrueGain,
    of_program,
    of_starts,
    of_workload,
)
from tests.unit.improve.simulate import searches

SEED = 4313
"""Of all programs and workloads, by their numbers. Nothing was chosen by runs with it."""
PROGRAM = """
import time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep({delay_s})
        generator = torch.Generator().manual_seed(index)
        return torch.randn({width}, generator=generator)

torch.manual_seed(0)
dist.init_process_group("gloo")
layers = [nn.Linear({width}, {width}, bias=False) for _ in range({layers})]
model = DistributedDataParallel(nn.Sequential(*layers){ddp})
optimizer = torch.optim.{optimizer}
for batch in DataLoader(Samples(), batch_size={batch}):
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()
"""
WORKLOAD = """
import time, torch
from torch import nn
from gpurun import Workload

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep({delay_s})
        generator = torch.Generator().manual_seed(index)
        return torch.randn({width}, generator=generator), torch.zeros({width})

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({width}, {width}, bias=False) for _ in range({layers}))
        self.idle = nn.Linear(2, 2) if {idle} else None

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

def batch(size, generator):
    return torch.randn(size, {width}, generator=generator), torch.zeros(size, {width})

def build():
    optimizer = lambda parameters: torch.optim.{optimizer}
    return Workload(Model(), loss=nn.functional.mse_loss, optimizer=optimizer, {data})
"""
JOB = "workload: train.py:build\ndevices: {devices}\nglobal_batch: {batch}\n{key}\n"
OF_WORKLOADS = {
    "delay_s": 0.0, "width": 16, "layers": 4, "idle": False, "data": "batch=batch", "batch": 16,
    "devices": "cpu:2", "key": "", "optimizer": "SGD(parameters, lr=0.01)",
}  # fmt: skip
PLAIN = {"delay_s": 0.0, "width": 16, "layers": 4, "ddp": "", "batch": 8}
SGD, ADAM = "SGD(model.parameters(), lr=0.01)", "Adam(model.parameters(), lr=1e-3, foreach=False)"
WORKERS, OPTIMIZER, THREADS = "DataLoader(num_workers", "Adam(", "OMP_NUM_THREADS="
UNUSED = ("DistributedDataParallel(find_unused", "DistributedDataParallel(static_graph")
BUCKETS = "DistributedDataParallel(bucket_cap_mb"


@dataclass(frozen=True)
class Drawn:
    """A program or workload, and the remedies of which one has to be kept; none: nothing helps."""

    text: str
    remedies: Sequence[Sequence[str]] = ()
    devices: str = "cpu:2"
    env: dict[str, str] = field(default_factory=dict)
    hurts: Sequence[str] = ()
    """Remedies that must not be kept."""
    job: str = ""
    """Of a workload."""
    mbit_per_s: float = 0.0
    """The rate of the link between ranks; 0: that of the machine."""

    def within(self, line: Sequence[str]) -> list[str]:
        """The command line in the network of the program."""
        if not self.mbit_per_s:
            return list(line)
        kbit = round(1000 * self.mbit_per_s)
        return ["unshare", "--net", "sh", "-c", SLOW_LINK.format(kbit=kbit), "sh", *line]

    def side(self, directory: Path) -> Side:
        """It in a directory of its own."""
        directory.mkdir()
        for name, text in {"train.py": self.text, "job.yaml": self.job}.items():
            if text:
                (directory / name).write_text(text)
        return Side(directory, self.env, self.within)


def slow_dataset(rng: Random) -> Drawn:
    values = PLAIN | {"delay_s": round(rng.uniform(0.001, 0.004), 4), "optimizer": SGD}
    return Drawn(PROGRAM.format(**values), [(WORKERS,)])


def many_parameters(rng: Random) -> Drawn:
    values = PLAIN | {"layers": rng.randint(150, 300), "optimizer": ADAM}
    return Drawn(PROGRAM.format(**values), [(OPTIMIZER,)])


def unused(rng: Random) -> Drawn:
    """Which parameters take part is one more message for each step."""
    return over_a_slow_link(rng, ", find_unused_parameters=True", UNUSED)


def tiny_buckets(rng: Random) -> Drawn:
    """Every gradient is sent alone."""
    return over_a_slow_link(rng, ", bucket_cap_mb=0.000001", (BUCKETS,))


def over_a_slow_link(rng: Random, ddp: str, remedies: Sequence[str]) -> Drawn:
    values = PLAIN | {"width": 4, "layers": rng.randint(3, 6), "optimizer": SGD, "ddp": ddp}
    return Drawn(PROGRAM.format(**values), [remedies], mbit_per_s=round(rng.uniform(1.0, 3.0), 1))


def one_thread(rng: Random) -> Drawn:
    values = PLAIN | {"width": rng.randint(600, 900), "batch": 256, "layers": 3, "optimizer": SGD}
    text = without_loader(PROGRAM.format(**values))
    return Drawn(text, [(THREADS,)], "cpu:1", {"OMP_NUM_THREADS": "1"})


def two_losses(rng: Random) -> Drawn:
    values = PLAIN | {"delay_s": 0.0015, "layers": rng.randint(200, 300), "optimizer": ADAM}
    return Drawn(PROGRAM.format(**values), [(WORKERS,), (OPTIMIZER,)])


def with_clock(text: str) -> str:
    """The program with so many steps, whose time it prints."""
    begun = text.replace("for batch in DataLoader(", "ends = []\nfor batch in DataLoader(")
    return (
        f"{begun}    ends.append(time.perf_counter())\n    if len(ends) == {STEPS}:\n        break\n"
        f"each_s = (ends[-1] - ends[{UNCOUNTED - 1}]) / {STEPS - UNCOUNTED}\n"
        f"if dist.get_rank() == 0:\n    print('{CLOCK}', 1000 * each_s)\n"
        "dist.destroy_process_group()\n"
    )


def without_loader(text: str) -> str:
    """The program with the same samples in each step."""
    loop = r"samples = torch.randn(\1, layers[0].in_features)\nfor batch in itertools.repeat(samples):"
    text = re.sub(r"for batch in DataLoader\(Samples\(\), batch_size=(\d+)\):", loop, text)
    return f"import itertools\n{text}"


def nothing(rng: Random) -> Drawn:
    """Matrix products on all cores."""
    values = PLAIN | {"width": rng.randint(500, 800), "batch": 128, "layers": 3, "optimizer": SGD}
    return Drawn(without_loader(PROGRAM.format(**values)))


def workers_on_a_full_machine(rng: Random) -> Drawn:
    """Samples take as much of the cores as the ranks do, one on each core."""
    text = PROGRAM.format(**PLAIN | {"layers": rng.randint(40, 80), "optimizer": SGD})
    busy = text.replace("time.sleep(0.0)", f"sum(range({rng.randint(10_000, 30_000)}))")
    return Drawn(busy, devices=f"cpu:{os.cpu_count()}", hurts=[WORKERS])


def workers_for_small_samples(rng: Random) -> Drawn:
    """A sample takes less time than to hand it over."""
    values = PLAIN | {"width": rng.randint(8, 32), "optimizer": SGD}
    return Drawn(PROGRAM.format(**values).replace("time.sleep(0.0)", "pass"), hurts=[WORKERS])


def workers_for_few_batches(rng: Random) -> Drawn:
    """A DataLoader of few batches is made again and again."""
    text = PROGRAM.format(**PLAIN | {"optimizer": SGD}).replace("1_000_000", str(8 * rng.randint(3, 6)))
    loader = "DataLoader(Samples(), batch_size=8)"
    again = f"batches = (batch for _ in range(10**6) for batch in {loader})\nfor batch in batches:"
    return Drawn(text.replace(f"for batch in {loader}:", again), hurts=[WORKERS])


def compile_of_200_steps(rng: Random) -> Drawn:
    text = PROGRAM.format(**PLAIN | {"layers": rng.randint(40, 80), "optimizer": SGD})
    return Drawn(text.replace("1_000_000", str(8 * 200)), hurts=["model.compile()"])


def random_samples(rng: Random) -> Drawn:
    """Workers draw their random numbers otherwise."""
    return of_other_samples(rng, "randn({width}, generator=generator)", "rand({width})")


def counted_samples(rng: Random) -> Drawn:
    """Each worker counts its own samples."""
    counted = (
        "self.__dict__.update(seen=self.__dict__.get('seen', 0) + 1)\n        return (1 + self.seen / 1000) *"
    )
    return of_other_samples(rng, "return", counted, after="manual_seed(index)")


def repeated_samples(rng: Random) -> Drawn:
    """Each worker yields all samples."""
    each = "def __iter__(self):\n        return map(self.sample, range(10**6))\n\n    def sample"
    drawn = of_other_samples(rng, "def __getitem__", each)
    length = "    def __len__(self):\n        return 1_000_000\n\n"
    return replace(
        drawn, text=drawn.text.replace(length, "").replace("Dataset\n", "IterableDataset as Dataset\n")
    )


def of_other_samples(rng: Random, old: str, new: str, after: str = "") -> Drawn:
    """A slow dataset, in which something is replaced so that workers make other samples."""
    before, end, rest = PROGRAM.rpartition(after) if after else ("", "", PROGRAM)
    values = PLAIN | {"delay_s": round(rng.uniform(0.001, 0.004), 4), "optimizer": SGD}
    text = before + end + rest.replace(old, new, 1)
    return Drawn(text.format(**values), hurts=[WORKERS])


def one_large_bucket(rng: Random) -> Drawn:
    """Nothing is sent while gradients are computed."""
    values = PLAIN | {"width": rng.randint(900, 1100), "layers": 12, "optimizer": SGD}
    return Drawn(PROGRAM.format(**values), hurts=[f"{BUCKETS}=100"])


def copies_of_large_tensors(rng: Random) -> Drawn:
    """An optimizer for many tensors at once has copies of all of them."""
    values = PLAIN | {"width": rng.randint(900, 1100), "layers": 6}
    adam = "Adam(model.parameters(), lr=1e-3)"
    return Drawn(PROGRAM.format(**values, optimizer=adam), hurts=["Adam(foreach=True"])


def workload(remedies: Sequence[str], mbit_per_s: float = 0.0, **values: object) -> Drawn:
    """A workload with a loss that these remedies end."""
    values, rate = OF_WORKLOADS | values, round(mbit_per_s, 1)
    return Drawn(WORKLOAD.format(**values), [remedies], job=JOB.format(**values), mbit_per_s=rate)


def slow_samples(rng: Random) -> Drawn:
    delay_s = round(rng.uniform(0.001, 0.004), 4)
    return workload(("workers: ",), delay_s=delay_s, data="dataset=Samples()")


def plain_optimizer(rng: Random) -> Drawn:
    optimizer = "Adam(parameters, lr=1e-3, foreach=False)"
    return workload(("optimizer: ",), layers=rng.randint(150, 300), optimizer=optimizer)


def idle_parameters(rng: Random) -> Drawn:
    """Which DDP looks for in each step, with one more message."""
    return workload(("static_graph: ",), rng.uniform(1.0, 3.0), layers=rng.randint(3, 6), width=4, idle=True)


def averages_of_each_micro_batch(rng: Random) -> Drawn:
    values = {"layers": rng.randint(3, 6), "width": 4, "key": "accumulate: 4\nsync_every: 1"}
    return workload(("no sync_every",), rng.uniform(1.0, 3.0), **values)


def one_thread_each(rng: Random) -> Drawn:
    values = {"width": rng.randint(600, 900), "batch": 256, "layers": 3}
    return workload(("threads: ",), devices="cpu:1", key="threads: 1", **values)


def checkpointed(rng: Random) -> Drawn:
    values = {"width": rng.randint(300, 500), "batch": 128, "layers": rng.randint(8, 16)}
    return workload(("checkpointing: ",), key="checkpointing: full", **values)


PLANTED = (slow_dataset, many_parameters, unused, tiny_buckets, one_thread, two_losses)
IN_WORKLOADS = (
    slow_samples, plain_optimizer, idle_parameters, averages_of_each_micro_batch, one_thread_each,
    checkpointed,
)  # fmt: skip
WRITTEN = (slow_dataset, many_parameters, tiny_buckets, unused)
"""Also started by torchrun, as the change has it."""
STEPS, UNCOUNTED = 300, 20
"""Of each start, and of those the first."""
HURTS = (
    workers_on_a_full_machine, workers_for_small_samples, workers_for_few_batches, compile_of_200_steps,
    one_large_bucket, copies_of_large_tensors,
)  # fmt: skip
OTHER_LOSSES = (random_samples, counted_samples, repeated_samples)
SLOW_LINK = (
    "ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate {kbit}kbit burst 1600 limit 10000000 "
    '&& exec "$@"'
)
"""In a network namespace of its own, so that it takes root."""
CELLS = {
    "planted": (PLANTED, 20, "2m"),
    "planted in workloads": (IN_WORKLOADS, 10, "2m"),
    "written": (WRITTEN, 4, "2m"),
    "nothing helps": ((nothing,), 20, "90s"),
    "hurts": (HURTS, 6, "2m"),
    "other losses": (OTHER_LOSSES, 6, "2m"),
}
TRUE_GAIN_S = 50.0
"""For the true gain of what one search has kept."""
IMPROVE = (sys.executable, "-m", "gpurun", "improve")
SIMULATED = 2000
HELPS = {
    "DataLoader(num_workers=2, persistent_workers=True)": 0.7,
    "DistributedDataParallel(find_unused_parameters=False)": 0.75,
    "AdamW(fused=True)": 0.8,
}
"""What helps in simulated searches, with the factor of the time of a step."""


@dataclass(frozen=True)
class Outcome:
    """What one search kept."""

    cell: str
    number: int
    kind: str
    kept: tuple[str, ...]
    gain_percent: float | None
    ci: tuple[float, float] | None
    found: int
    """How many of the planted losses."""
    planted: int
    hurting: int
    """How many of what hurts were kept."""
    seconds: float
    """Of the search."""
    true: TrueGain | None = None
    """The gain in other runs; `None`: nothing is kept."""
    is_outside: bool | None = None
    """Whether it contradicts the stated interval."""
    missed: tuple[str, ...] = ()
    """Planted losses whose remedies aren't kept, each with what the search says of these."""


def drawn(cell: str, number: int, seed: int = SEED) -> tuple[str, Drawn]:
    """The program or workload with this number."""
    kinds = CELLS[cell][0]
    kind = kinds[number % len(kinds)]
    program = kind(Random(f"{seed}/{cell}/{number}"))
    return kind.__name__, replace(program, text=with_clock(program.text)) if cell == "written" else program


def run(cell: str, number: int, seed: int = SEED) -> Outcome:
    """One search, and what the change then gains."""
    kind, program = drawn(cell, number, seed)
    with tempfile.TemporaryDirectory() as name:
        original, changed = (program.side(Path(name) / each) for each in ("original", "changed"))
        what = ["job.yaml"] if program.job else ["train.py", "--devices", program.devices]
        options = ["--json", "--quiet", "--budget", CELLS[cell][2], "--out", "found"]
        began_s = time.monotonic()
        found = json.loads(changed.output(*IMPROVE, *what, *options))["improve"]
        seconds = time.monotonic() - began_s
        gain = found["gain"] or {"percent": None, "ci": None}
        true = true_gain(cell, program, found, original, changed) if gain["ci"] else None
    kept = tuple(each["code"] for each in found["remedies"] if each["verdict"] == "kept")
    missed = [names for names in program.remedies if not any(code.startswith(tuple(names)) for code in kept)]
    hurting = sum(code.startswith(tuple(program.hurts)) for code in kept)
    return Outcome(
        cell, number, kind, kept, gain["percent"], gain["ci"] and tuple(gain["ci"]),
        len(program.remedies) - len(missed), len(program.remedies), hurting, round(seconds, 1), true,
        None if true is None else true.contradicts(gain["ci"]),
        tuple(said_of(found["remedies"], tuple(names)) for names in missed),
    )  # fmt: skip


def said_of(remedies: Sequence[Mapping[str, Any]], names: tuple[str, ...]) -> str:
    """What a search says of remedies whose names begin so."""
    return "; ".join(
        f"{each['code']}: {each['verdict']}, {each['percent'] or 0:+.1f} %, {each['why']}"
        for each in remedies
        if each["code"].startswith(names) and each["verdict"] != "not tried"
    )


def true_gain(
    cell: str, program: Drawn, found: Mapping[str, Any], original: Side, changed: Side
) -> TrueGain | None:
    """What the change gains in other runs, once it is written; `None` where no loss was planted."""
    if not program.remedies:
        return None
    if found["diff"]:
        changed.output(*IMPROVE, "--resume", "found", "--write", "--yes", "--force")
    changed = replace(changed, env={**changed.env, **found["env"]})
    if cell == "written":
        return of_starts(original, changed, ranks=int(program.devices.partition(":")[2]))
    if program.job:
        return of_workload(original, changed, TRUE_GAIN_S)
    return of_program(original, changed, program.devices, TRUE_GAIN_S)


def main(words: Sequence[str] | None = None) -> None:
    """Runs what is missing, and writes the section."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks improve", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/benchmark-improve"))
    parser.add_argument("--only", action="append", choices=list(CELLS))
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(words)
    options.directory.mkdir(parents=True, exist_ok=True)
    file, until_s = options.directory / "improve.jsonl", time.monotonic() + 60 * options.minutes
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(each["cell"], each["number"]) for each in known}
    for cell in options.only or CELLS:
        for number in range(CELLS[cell][1]):
            if (cell, number) in done or time.monotonic() > until_s:
                continue
            outcome = asdict(run(cell, number, options.seed))
            known.append(outcome)
            with file.open("a") as lines:
                lines.write(json.dumps(outcome) + "\n")
            print(json.dumps(outcome), flush=True)
    if options.seed == SEED:
        record("Improve", f"{section(known)}\n\n{simulated_text()}", machine_facts())
    else:
        print(section(known))


def section(known: Sequence[Mapping[str, Any]]) -> str:
    """A row for each kind of program, the true gains, and those by torchrun."""
    rows = []
    for cell, (kinds, _, budget) in CELLS.items():
        for kind in kinds:
            own = [each for each in known if (each["cell"], each["kind"]) == (cell, kind.__name__)]
            is_planted = any(each["planted"] for each in own)
            whole = sum(each["found"] == each["planted"] for each in own) if is_planted else ""
            any_kept = sum(bool(each["kept"]) for each in own)
            true = [each for each in own if each.get("true")]
            outside = f"{sum(each['is_outside'] for each in true)} of {len(true)}" if true else ""
            hurting = sum(each["hurting"] for each in own) if cell in ("hurts", "other losses") else ""
            name = f"{kind.__name__.replace('_', ' ')}{', by torchrun' * (cell == 'written')}"
            rows.append((name, budget, str(len(own)), *map(str, (whole, any_kept, outside, hurting))))
    head = (
        "program", "budget", "searches", "all losses found", "anything kept", "true gain outside",
        "what hurts or has other losses kept",
    )  # fmt: skip
    missed = [f"Missed: {each['kind']}: {'; '.join(each['missed'])}." for each in known if each.get("missed")]
    return "\n\n".join(filter(None, (table(head, rows), *missed, true_text(known), starts_text(known))))


def true_text(known: Sequence[Mapping[str, Any]]) -> str:
    """In how many searches the stated interval is contradicted."""
    true = [each for each in known if each.get("true") and each["cell"].startswith("planted")]
    outside = sum(each["is_outside"] for each in true)
    return (
        f"The true gain is that of the written change in other runs, in turns with the original for "
        f"{TRUE_GAIN_S:.0f} s. In {outside} of {len(true)} searches that kept something it is outside of the "
        "stated interval, widened by the true gain's own error of 95 % (goal: ≤ 3 of 30)."
    )


def starts_text(known: Sequence[Mapping[str, Any]]) -> str:
    """The gain that was stated, beside that of ten starts by torchrun."""
    rows = [
        (
            each["kind"].replace("_", " "),
            f"{each['gain_percent']:.1f} % ({each['ci'][0]:.1f} to {each['ci'][1]:.1f})",
            f"{each['true']['percent']:.1f} % (standard error {each['true']['error']:.1f})",
            "no" if each["is_outside"] else "yes",
        )
        for each in known
        if each["cell"] == "written" and each.get("true")
    ]
    head = ("written, then ten starts by torchrun", "time per step, stated", "by its own clock", "agree")
    return table(head, rows) if rows else ""


def simulated_text() -> str:
    """How often simulated searches keep what doesn't help, and state an interval that is wrong."""
    kept = sum(bool(each.kept) for each in searches(SIMULATED, SEED, {}))
    stated = [each for each in searches(SIMULATED, SEED + 1, HELPS) if each.kept]
    wrong = sum(not each.covers for each in stated)
    return (
        f"Of {SIMULATED:,} simulated searches in which nothing helps, {kept} keep something (goal: ≤ 5 %). "
        f"Of {SIMULATED:,} in which three remedies help by 20 to 30 %, {len(stated):,} keep something, of "
        f"which {wrong} state an interval, of the gain or of a remedy, that misses what is true (≤ 5 %)."
    )


if __name__ == "__main__":
    main()
