"""Secrets that a job states or the shell has: the program gets them, and the run directory doesn't."""

import base64
import gzip
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command import Result, gpurun, write

STATED, OVERRIDDEN, EXPORTED = "stated-0123456789", "overridden-012345", "exported-01234567"
PROGRAM = f"""
    import os
    values = os.environ["HF_TOKEN"], os.environ["API_KEY"], os.environ["SHELL_SECRET"]
    assert values == {(STATED, OVERRIDDEN, EXPORTED)}
    assert "GPURUN_SECRET" not in os.environ  # by which nodes know each other
    open("ran", "a").write("x")
    if not os.path.exists("mended"):
        raise ConnectionError("401 for", values)
"""
JOB = f"""
    script: program.py
    devices: cpu:1
    env: {{HF_TOKEN: {STATED}}}   # {STATED}
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Result, Result, Result]]:
    """A run that fails, resumed without the secrets and with them."""
    directory = tmp_path_factory.mktemp("secrets")
    write(directory, "program.py", PROGRAM)
    write(directory, "job.yaml", JOB)
    env = {"SHELL_SECRET": EXPORTED, "GPURUN_SECRET": "f5c1a7e09b3d4826"}
    old = os.umask(0o077)
    try:
        first = gpurun(directory, "job.yaml", "--set", f"env.API_KEY={OVERRIDDEN}", "--out", "run", env=env)
        (directory / "mended").touch()
        second = gpurun(directory, "--resume", "run", env=env)
        third = gpurun(directory, "--resume", "run", env={**env, "API_KEY": OVERRIDDEN})
        yield first, second, third
    finally:
        os.umask(old)


def test_the_program_gets_them_and_a_resumed_run_too(ran: tuple[Result, Result, Result]) -> None:
    first, second, third = ran
    assert (first.code, second.code, third.code) == (4, 2, 0), third.err
    assert "mask of API_KEY" in second.err
    assert (first.directory / "ran").read_text() == "xx"


def test_no_record_report_or_message_has_them(ran: tuple[Result, Result, Result]) -> None:
    first, second, third = ran
    assert "401 for" in first.err
    assert gpurun(first.directory, "report", "run", "--format", "table,html,tensorboard").code == 0
    shown = first.err + first.out + second.err + third.err
    records = {path: path.read_bytes() for path in (first.directory / "run").rglob("*") if path.is_file()}
    for secret in (STATED, OVERRIDDEN, EXPORTED):
        assert secret not in shown
        own = [path for path, content in records.items() if secret.encode() in content]
        assert [path.name for path in own] == ["rank0.log"], "only what the program itself has written"


def test_a_search_for_improvements_gives_it_to_the_program(tmp_path: Path) -> None:
    write(tmp_path, "program.py", f"""
        import os
        raise SystemExit("it has the token" if os.environ["HF_TOKEN"] == {STATED!r} else "it has another")
    """)  # fmt: skip
    write(tmp_path, "job.yaml", JOB)
    done = gpurun(tmp_path, "improve", "job.yaml", "--budget", "10m").ended(4)
    assert "program.py fails as it is: rank 0 ended by itself: it has the token" in done.err


@pytest.mark.parametrize(
    "command", [("improve", "job.yaml"), ("gate", "job.yaml", "--against", "before", "--fail-slower", "3%")]
)
def test_where_only_a_mask_is_known_nothing_begins(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "before").mkdir()
    for directory in (tmp_path, tmp_path / "before"):
        write(directory, "program.py", PROGRAM)
    write(tmp_path, "job.yaml", JOB.replace(STATED, "masked:3fa2b1"))
    assert "the job has only the mask of HF_TOKEN" in gpurun(tmp_path, *command).ended(2).err
    assert not (tmp_path / "runs").exists()


def test_files_have_the_permissions_that_the_umask_leaves(ran: tuple[Result, Result, Result]) -> None:
    modes = {path: path.stat().st_mode & 0o077 for path in (ran[0].directory / "run").rglob("*")}
    assert not {path: mode for path, mode in modes.items() if mode}


def test_a_report_to_send_does_not_name_the_machine(ran: tuple[Result, Result, Result]) -> None:
    directory = ran[0].directory
    for more, is_named in (((), False), (("--with-host",), True)):
        assert gpurun(directory, "report", "run", "--format", "html", *more).code == 0
        words = re.findall(r"\w+", data_of(directory / "run" / "report.html"))
        assert (os.uname().nodename in words) == is_named


def data_of(page: Path) -> str:
    """What an HTML report holds, unpacked."""
    found = re.search(r'id="data">([^<]*)<', page.read_text())
    assert found is not None
    return gzip.decompress(base64.b64decode(found[1])).decode()
