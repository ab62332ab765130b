"""Only what no one else may change is resumed: the run, and the job file that it names."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from gpurun.launcher.errors import SpecError
from gpurun.launcher.run.open import read_invocation
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.paths import check_owner
from tests.wording import Wording

other_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    shutil.copytree("docs/runs/balanced", tmp_path / "run")
    return RunDir(tmp_path / "run")


ACL = "system.posix_acl_access"
NO_ID = 0xFFFFFFFF


def let_write(path: Path, tag: int, allowed: int) -> None:
    """Adds user or group 65534 to the file's access control list, whose mask the group's bits show.

    Source: linux/posix_acl.h: USER_OBJ 1, USER 2, GROUP_OBJ 4, GROUP 8, MASK 16, OTHER 32.
    """
    entries = sorted([(1, 7, NO_ID), (4, 5, NO_ID), (16, 7, NO_ID), (32, 5, NO_ID), (tag, allowed, 65534)])
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, ACL, value)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error.strerror}")


@pytest.mark.parametrize("place", [".", "job.yaml", "plan.json", "invocation.json"])
@pytest.mark.parametrize(
    "tag", [pytest.param(None, marks=other_user), 2, 8], ids=["group of the file", "user", "group"]
)
def test_a_run_that_others_may_change_is_not_resumed(
    run: RunDir, place: str, tag: int | None, wording: Wording
) -> None:
    """By the group of a file or by its access list."""
    path = run.path / place
    path.chmod(0o775) if tag is None else let_write(path, tag, 5)
    if os.geteuid() == 0:  # whose group has no other member
        check_owner(run.path)
    os.chown(path, -1, 12345) if tag is None else let_write(path, tag, 7)
    with wording.raises(SpecError):
        check_owner(run.path)
    path.chmod(0o755)  # as the remedy does: the mask
    check_owner(run.path)


@other_user
def test_a_job_file_that_others_may_change_is_not_resumed(
    run: RunDir, tmp_path: Path, wording: Wording
) -> None:
    job = tmp_path / "elsewhere.yaml"
    shutil.copy(run.job, job)
    run.invocation.write_text(json.dumps({**json.loads(run.invocation.read_text()), "job_file": str(job)}))
    assert read_invocation(run.path).job_file == job
    job.chmod(0o666)
    with wording.raises(SpecError):
        read_invocation(run.path)
    job.chmod(0o644)
    os.chown(job, 1234, -1)
    with wording.raises(SpecError):
        read_invocation(run.path)
