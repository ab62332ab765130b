"""A rank's own account of its end: real exceptions in, a file out."""

import errno
from pathlib import Path

import pytest
import torch

from gpurun.launcher.errors import SpecError, VariantError
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.worker.base.failure import Kind, record_failure
from tests.wording import Wording

ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
)


def record_of(tmp_path: Path, error: BaseException) -> tuple[Kind, bool]:
    try:
        raise error
    except BaseException as caught:
        written = record_failure(RunDir(tmp_path), "01-ddp-2", 3, "ddp-2-even", "round", caught)
    (read,) = RunDir(tmp_path).read_failures("01-ddp-2")
    assert read == written
    assert (read.rank, read.variant, read.stage) == (3, "ddp-2-even", "round")
    assert ("record_of" in read.traceback) == (read.kind != "user")  # A mistake names its place itself.
    return read.kind, read.secondary


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError(ALLOCATOR),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.distributed.DistBackendError(
            "NCCL error: unhandled cuda error, Failed to CUDA calloc: out of memory"
        ),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_memory_that_ran_out_is_distinguished(tmp_path: Path, error: BaseException) -> None:
    assert record_of(tmp_path, error) == ("oom", False)


def test_a_message_to_a_user_has_no_traceback_of_ours(tmp_path: Path, wording: Wording) -> None:
    try:
        try:
            raise SpecError("the devices can hold 100 + 30 = 130 samples, not 200")
        except SpecError as error:
            raise MemoryError(str(error)) from error
    except MemoryError as caught:
        record = record_failure(RunDir(tmp_path), "01-ddp-2", 0, "ddp-2-balanced", "balance", caught)
    assert (record.kind, record.type, record.traceback) == ("oom", "MemoryError", "")
    wording(record.message)


class Wordless(ValueError):
    def __str__(self) -> str:
        raise TypeError("not even a word")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError(torch._utils.KeyErrorMessage("Caught KeyError in worker")), "Caught KeyError in worker"),
        (ValueError("\udcff bad"), "\\udcff bad"),
        (Wordless(), "(Wordless's __str__ raised TypeError)"),
        (SystemExit("\ud800"), "\\ud800"),
        (SystemExit(Wordless()), "(Wordless's __str__ raised TypeError)"),
    ],
)
def test_words_that_no_file_can_hold_cost_no_record(tmp_path: Path, error: BaseException, words: str) -> None:
    record_of(tmp_path, error)
    (read,) = RunDir(tmp_path).read_failures("01-ddp-2")
    assert (read.message, read.type) == (words, type(error).__name__)


def test_a_real_allocation_that_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert record_of(tmp_path, caught.value)[0] == "oom"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5000"),
        RuntimeError("[../gloo/transport/tcp/buffer.cc:75] Timed out waiting 1800000ms for recv operation"),
        torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"),
        torch.distributed.DistNetworkError("failed to recv, got 0 bytes"),
    ],
)
def test_a_lost_peer_is_no_cause(tmp_path: Path, error: BaseException) -> None:
    assert record_of(tmp_path, error) == ("exception", True)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("Connection closed by peer"), "exception"),
        (ValueError("out of memory"), "exception"),
        (ConnectionResetError("the user's own server"), "exception"),
        (TimeoutError("the user's own server"), "exception"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "exception"),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), "exception"),
        (SystemExit(3), "exit"),
        (VariantError("train.py:3: the loss is not a scalar"), "user"),
    ],
)
def test_a_users_own_failure_is_a_cause(tmp_path: Path, error: BaseException, kind: Kind) -> None:
    assert record_of(tmp_path, error) == (kind, False)
