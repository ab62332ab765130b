"""Output of programs as lines: progress bars, escape sequences, portions cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.logs.lines import MAX_LINE_BYTES, LineReader, NeedlessLines, clean, prefixed


def read(*portions: bytes) -> list[str]:
    reader = LineReader()
    found = [line for portion in portions for line in reader.feed(portion)]
    return found + reader.finish()


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"  0%|  |\r 50%|# |\r100%|##|\nnext\n", ["100%|##|", "next"]),
        (b" 50%|# |\r\n", [" 50%|# |"]),
        (b"no end", ["no end"]),
        (b"\x1b[A\x1b[2Kbar\n", ["bar"]),
        (b"\x1b[31mred\x1b[0m\n", ["\x1b[31mred\x1b[0m"]),
        (b"\x1b]0;title\x07text\x00\x08\n", ["text"]),
        ("größer\n".encode(), ["größer"]),
        (b"\xff\xfe\n", ["��"]),
    ],
)
def test_of_every_line_its_last_state_is_kept(written: bytes, lines: list[str]) -> None:
    assert read(written) == lines


@given(st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\xc3\xa4", b"\x1b[1m", b" "]), max_size=40), st.data())
def test_portions_make_no_difference(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    portions = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert read(*portions) == read(whole)


@given(st.binary(max_size=300))
def test_nothing_that_moves_the_cursor_comes_through(written: bytes) -> None:
    for line in read(written):
        assert not set(line) & {"\r", "\n", "\x08", "\x00", "\x9b"}
        assert all(rest.startswith("[") for rest in line.split("\x1b")[1:])


def test_a_bar_that_never_ends_needs_no_memory_and_can_be_seen() -> None:
    reader = LineReader()
    assert reader.bar is None
    for percent in range(5000):
        assert reader.feed(f"\r{percent} of 5000".encode()) == []
    assert reader.bar == "4999 of 5000"
    assert reader.feed(b"\rdone\nplain") == ["done"]
    assert reader.bar is None


def test_a_line_without_end_is_cut() -> None:
    lines = read(b"x" * (3 * MAX_LINE_BYTES))
    assert "".join(lines) == "x" * (3 * MAX_LINE_BYTES)
    assert max(map(len, lines)) == MAX_LINE_BYTES


def test_a_prefix_has_the_ranks_colour_or_there_is_no_colour_at_all() -> None:
    assert prefixed(3, "\x1b[31mred\x1b[0m", colour=False) == "[rank 3] red"
    assert prefixed(3, "red", colour=True) == "\x1b[35m[rank 3]\x1b[0m red"
    assert prefixed(3, "\x1b[31mred", colour=True).endswith("\x1b[0m")
    assert clean("\x1b[31mred") == "\x1b[31mred"


def test_a_line_of_the_profiler_behind_a_progress_bar_does_not_interrupt_it() -> None:
    reader = LineReader()
    said = b"\r 50%USDT:2026-11-24 19:58:01 4021:4038 Profiler.cpp:9] started\n\r 60%\n"
    assert [*reader.feed(said[:20]), *reader.feed(said[20:])] == [" 60%"]


KINETO = "2026-11-24 19:58:01 4021:4038 DeviceProperties.cpp:56] gpuGetDeviceCount failed with code"


RETRIES = (
    "[W1129 22:00:45.548803726 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host "
    "localhost:12355 - retrying (try=0, timeout=1800000ms, delay=35955ms): {}"
)
FRAME = "frame #1: c10::DistError::DistError(int) + 0x72 (0x7f8984933b62 in /torch/lib/libc10.so)"


@pytest.mark.parametrize(
    ("line", "is_left_out"),
    [
        (f"ERROR:{KINETO} 35", True),
        (f"ERROR:{KINETO} 100", True),
        (f"ERROR:{KINETO} 2", False),  # out of memory
        (f"my ERROR:{KINETO} 35", False),
        (f"ERROR:{KINETO} 35, so we stop", False),
        ("ERROR: gpuGetDeviceCount failed with code 35", False),
        ("USDT:2026-11-24 19:58:01 4021:4038 Profiler.cpp:9] stopped", True),
        (RETRIES.format("Interrupted system call"), True),
        (RETRIES.format("Connection refused"), False),
        ("USDT: 0.9998", False),
        ('  File "/site-packages/gpurun/launcher/worker/entry/zygote.py", line 8 in main', True),
        ('  File "<frozen runpy>", line 88 in _run_code', True),
        ('  File "/home/me/train.py", line 3 in <module>', False),
        ('  File "/site-packages/gpurun/launcher/worker/entry/zygote.py", line 8, in main', False),
        (FRAME, False),
        ("frame #12 of the video", False),
    ],
)
def test_what_the_profiler_says_of_missing_gpus_is_left_out(line: str, is_left_out: bool) -> None:
    assert NeedlessLines().has(line) is is_left_out


@pytest.mark.parametrize("width", [7, 10_000])
def test_addresses_are_left_out_where_torch_prints_that_a_signal_of_ours_came(width: int) -> None:
    """A program that has set TORCH_SHOW_CPP_STACKTRACES wants those of its own errors."""
    raised = "Exception raised from delay at /torch/csrc/c10d/socket.cpp:126 (most recent call first):"
    interrupted = [RETRIES.format("Interrupted system call"), raised, FRAME, "<omitting python frames>"]
    own = ["RuntimeError: bad shard", raised, FRAME, "the end"]
    written = "".join(f"{line}\n" for line in ["begins", *interrupted, *own]).encode()
    portions = [written[at : at + width] for at in range(0, len(written), width)]
    assert read(*portions) == ["begins", *own]
    passed_on = b"".join(map(NeedlessLines().without, written.splitlines(keepends=True)))
    assert passed_on.decode().splitlines() == ["begins", *own]
