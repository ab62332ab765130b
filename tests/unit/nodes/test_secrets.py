"""The secret that the nodes of a job share."""

import os
import secrets
import stat
from pathlib import Path

import pytest

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.nodes.join import joined
from gpurun.launcher.nodes.rendezvous import NodeFlags
from gpurun.launcher.nodes.transport.credentials import find_secret
from tests.wording import Wording


@pytest.mark.parametrize("weak", ["short", "abcdefghijklmnopqrstuvwxyz123456"])
def test_a_secret_that_is_refused_is_refused_before_a_node_waits(
    weak: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPURUN_SECRET", weak)
    job = load_text("workload: sleep\ndevices: cpu:1\nnodes: 2\nglobal_batch: 8\n", "", (), Path())
    said: list[str] = []
    flags = NodeFlags(1, "127.0.0.1:29400")
    with pytest.raises(SpecError, match=r"GPURUN_SECRET (is shorter|follows a simple pattern)"):
        joined(job, Path(), flags, inspect_machine(), said.append).__enter__()
    assert said == []


def test_a_secret_is_made_once_for_a_user(tmp_path: Path, wording: Wording) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    secret, path = find_secret(environ), tmp_path / "gpurun" / "secret"
    assert len(secret) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_secret(environ) == secret
    assert os.listdir(path.parent) == ["secret"]
    path.chmod(0o640)
    with wording.raises(MachineError):
        find_secret(environ)


def test_a_secret_from_the_environment_has_to_be_long(tmp_path: Path, wording: Wording) -> None:
    good = secrets.token_hex(8)
    assert find_secret({"GPURUN_SECRET": good}) == good.encode()
    with pytest.raises(SpecError, match="shorter than 16 bytes"):
        find_secret({"GPURUN_SECRET": "short"})
    for weak in ("s" * 40, "abcdefghijklmnopqrstuvwxyz", "1234567890123456", "geheim!?" * 2, "0123" * 8):
        with pytest.raises(SpecError, match="could be guessed"):
            find_secret({"GPURUN_SECRET": weak})
    (tmp_path / "file").touch()
    with wording.raises(MachineError):
        find_secret({"XDG_CONFIG_HOME": str(tmp_path / "file")})
