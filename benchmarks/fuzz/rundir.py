"""Damaged run directories, shown by every command and by the tab."""

import io
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any

import click
import msgspec
from werkzeug.datastructures import MultiDict

from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import GpurunError
from gpurun.launcher.tensorboard_plugin.logdir import Listing
from gpurun.launcher.tensorboard_plugin.routes import ROUTES, Query, RequestRefused, TabServer
from tests.damage.content import damaged

COUNT = 5000
RECORDED = Path(__file__).resolve().parents[2] / "docs" / "runs" / "gpt-splits"
LARGEST_BYTES = 1 << 24
SECRET = b"what lies outside of the run"
COMMANDS = (
    ("report", "run"),
    ("report", "run", "--json"),
    ("report", "run", "--format", "tensorboard,html"),
    ("trace", "run"),
    ("trace", "run", "--json"),
    ("diff", "run"),
    ("logs", "run"),
    ("stacks", "run"),
    ("capture", "run", "--steps", "1"),
)
SHOWN = (*("/runs", "/run", "/steps", "/progress") * 3, "/breakdown", "/operators")
"""Seldom those that need an index of the traces: a process has to make it."""
NAMES = (
    "rankfoo.jsonl",
    "rank-1.jsonl",
    "rank99999999999.jsonl",
    "rank\u0663.jsonl",
    "rank0 .jsonl",
    "\x1b[31m",
    "x\ny",
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1e308,
        10**30,
        10**400,
        2**63,
        "",
        "../..",
        "../secret",
        "/etc/passwd",
        "\x1b[2J",
        "\0",
        "a" * 5000,
    ),
    *([], {}, [[]], [None] * 1000, {"a": {}}, "nan", "ddp-2-even", "even"),
)
NUMBERS: tuple[Any, ...] = (-(10**30), 10**18, -(2**63), 1e-320, [{}], {"forward": 10**400}, {"x": -1})
RECORDED_KEYS = (
    *(
        "launch",
        "round",
        "order",
        "step",
        "kind",
        "step_ns",
        "phases_ns",
        "peak_bytes",
        "queue_ns",
        "others_ns",
    ),
    *("energy_mj", "gpus", "cpu_ns", "thread_cpu_ns", "block_ns", "throttled"),
    *("time_ns", "monotonic_ns", "stage", "variant"),
)
"""Of steps and of events."""


def case(chance: random.Random, directory: Path) -> None:
    """Each command shows what is left, or refuses with a message; none shows what links lead to."""
    run = directory / "run"
    shutil.copytree(chance.choice((RECORDED, analysed(), analysed(), analysed())), run)
    (directory / "secret").write_bytes(SECRET)
    for _ in range(chance.choice((1, 1, 2, 4))):
        chance.choice(DAMAGES)(chance, run)
    for command in chance.sample(COMMANDS, 2):
        shown = try_command((*command, str(analysed())) if command[0] == "diff" else command)
        assert SECRET.decode() not in shown
        assert "\x1b[2J" not in shown
    try_tab(directory, chance.choice(SHOWN))


@cache
def analysed() -> Path:
    """The recorded run with the analyses of its traces, once for the whole process."""
    run = Path(tempfile.mkdtemp()) / "run"
    shutil.copytree(RECORDED, run)
    try_command(("report", str(run)))
    return run


def prepare() -> None:
    analysed()


def try_command(argv: tuple[str, ...]) -> str:
    """What a command prints; a refusal has an exit code and a message."""
    printed = io.StringIO()
    code: object = 0
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            cli.main(list(argv), prog_name="gpurun", standalone_mode=False)
        except (GpurunError, click.ClickException) as error:
            print(error)
            code = error.exit_code
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    assert code == 0 or printed.getvalue().strip()
    return printed.getvalue()


def try_tab(directory: Path, route: str) -> None:
    """The tab answers or refuses; a file that can't be read becomes a sentence there."""
    server = TabServer(Listing(str(directory)))
    arguments = MultiDict({"run": "run", "variant": "ddp-2-even"})
    with suppress(RequestRefused, OSError):
        answer = ROUTES[route](server, Query(arguments))
        assert SECRET not in msgspec.json.encode(answer)
    server.indexes.wait()


def any_file(chance: random.Random, run: Path) -> Path:
    return chance.choice(sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink()))


def damage_content(chance: random.Random, run: Path) -> None:
    path = any_file(chance, run)
    if path.stat().st_size < LARGEST_BYTES:  # else it was made sparse before
        path.write_bytes(damaged(path.read_bytes() or b"{}", chance))


def damage_value(chance: random.Random, run: Path) -> None:
    """A value somewhere in a document of JSON is replaced."""
    path = chance.choice(
        sorted(path for path in run.rglob("*.json") if path.is_file() and path.stat().st_size < LARGEST_BYTES)
    )
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # damaged before
        return
    replace_value(chance, data)
    path.write_text(json.dumps(data))


def replace_value(chance: random.Random, data: Any) -> None:
    at = data
    while isinstance(at, dict | list) and at:
        key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not isinstance(at[key], dict | list) or chance.random() < 0.2:
            at[key] = chance.choice(VALUES)
            break
        at = at[key]


def damage_lines(chance: random.Random, run: Path) -> None:
    """Values of some records are replaced, in one line or in all."""
    path = chance.choice(
        sorted(
            path for path in run.rglob("*.jsonl") if path.is_file() and path.stat().st_size < LARGEST_BYTES
        )
    )
    key, value = chance.choice(RECORDED_KEYS), chance.choice((*VALUES, *NUMBERS))
    is_everywhere = chance.random() < 0.5
    lines = path.read_bytes().splitlines()
    for place, line in enumerate(lines):
        if is_everywhere or place == len(lines) // 2:
            with suppress(ValueError, RecursionError):  # damaged before
                record = json.loads(line)
                if isinstance(record, dict) and key in record:
                    lines[place] = json.dumps({**record, key: value}).encode()
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def add_rank(chance: random.Random, run: Path) -> None:
    """A rank that the plan doesn't have, with the records of another."""
    path = any_file(chance, run)
    if path.stat().st_size < LARGEST_BYTES and "rank" in path.name:
        other = re.sub(r"rank\d+", f"rank{chance.choice((2, 7, 9_999_999))}", path.name)
        if other != path.name:  # `rank-1.jsonl` is of no rank
            shutil.copy(path, path.with_name(other))


def replace_by_link(chance: random.Random, run: Path) -> None:
    """Out of the run, to itself, or to nothing."""
    path = any_file(chance, run)
    path.unlink()
    path.symlink_to(
        chance.choice((run.parent / "secret", path, run / "nowhere", Path("/dev/zero"), run.parent))
    )


def replace_by_other_kind(chance: random.Random, run: Path) -> None:
    path = any_file(chance, run)
    path.unlink()
    chance.choice((path.mkdir, lambda: os.mkfifo(path), lambda: None))()


def replace_directory(chance: random.Random, run: Path) -> None:
    path = chance.choice(sorted(path for path in run.rglob("*") if path.is_dir() and not path.is_symlink()))
    shutil.rmtree(path)
    chance.choice((lambda: path.symlink_to(run.parent), path.touch, lambda: None))()


def nest(chance: random.Random, run: Path) -> None:
    """Deeper than a recursive reader can follow."""
    any_file(chance, run).write_text(chance.choice(("[", '{"a":')) * 200_000)


def make_sparse(chance: random.Random, run: Path) -> None:
    """A huge file that takes no room."""
    os.truncate(any_file(chance, run), 20 << 30)


def add_odd_name(chance: random.Random, run: Path) -> None:
    name = chance.choice(NAMES)
    parent = any_file(chance, run).parent
    with suppress(OSError):  # added before, as the other
        chance.choice((lambda: (parent / name).mkdir(), lambda: (parent / name).write_bytes(b"{}")))()


DAMAGES: tuple[Callable[[random.Random, Path], None], ...] = (
    damage_content,
    damage_content,
    damage_value,
    damage_value,
    damage_value,
    damage_lines,
    damage_lines,
    add_rank,
    replace_by_link,
    replace_by_other_kind,
    replace_directory,
    nest,
    make_sparse,
    add_odd_name,
)
