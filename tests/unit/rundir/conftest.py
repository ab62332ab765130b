"""A run, and stores that hold nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    (directory / "variants/ddp-2").mkdir(parents=True)
    (directory / "launches/01/control").mkdir(parents=True)
    (directory / "launches/01/control/rank0").write_bytes(b"not copied")
    (directory / "running.json").write_bytes(b"not copied")
    (directory / ".draft").write_bytes(b"not copied")
    (directory / "plan.json").write_bytes(b"{}")
    (directory / "variants/ddp-2/rank0.jsonl").write_bytes(b"1\n")
    return directory
