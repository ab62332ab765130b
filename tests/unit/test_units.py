"""Figures as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher import units


@pytest.mark.parametrize(
    ("ms", "ci", "text"),
    [
        (42.123, (41.9, 42.3), "42.1 ± 0.3"),
        (42.1, (41.9, 42.3), "42.1 ± 0.2"),
        (1234.5, (1200.0, 1250.0), "1,234 ± 35"),
        (0.05123, (0.05120, 0.05125), "0.051 ± 0.001"),
        (5.0, (5.0, 5.0), "5.000 ± 0.000"),
        (42.123, None, "42.1"),
        (1234.5, None, "1,234"),
        (0.0512, None, "0.051"),
    ],
)
def test_ms(ms: float, ci: tuple[float, float] | None, text: str) -> None:
    assert units.format_ms(ms, ci) == text


@pytest.mark.parametrize(
    ("percent", "ci", "signed", "text"),
    [
        (13.78, (12.9, 14.6), False, "13.8 %"),
        (12.4, (10.6, 13.4), False, "12 %"),
        (0.31, (-0.4, 0.9), True, "+0.3 %"),
        (-0.31, (-0.9, 0.4), True, "\u22120.3 %"),
        (-0.001, (-0.4, 0.4), True, "0.0 %"),
        (0.123456, (0.1234, 0.1235), False, "0.12 %"),
        (45.3, None, False, "45 %"),
        (0.34, None, False, "0.3 %"),
    ],
)
def test_percent(percent: float, ci: tuple[float, float] | None, signed: bool, text: str) -> None:
    assert units.format_percent(percent, ci, signed) == text


@pytest.mark.parametrize(
    ("percent", "ci", "text"),
    [
        (13.78, (12.9, 14.6), "12.9 to 14.6"),
        (8.0, (0.3, 16.2), "0.3 to 16"),
        (8.0, (0.004, 16.2), "0.004 to 16"),
        (8.0, (0.0, 16.2), "0 to 16"),
        (0.3, (-0.4, 0.9), "\u22120.4 to +0.9"),
        (-3.0, (-3.9, -2.1), "\u22123.9 to \u22122.1"),
    ],
)
def test_percent_interval(percent: float, ci: tuple[float, float], text: str) -> None:
    assert units.format_percent_interval(percent, ci) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.42, "0.4 s"),
        (9.96, "10 s"),
        (50, "50 s"),
        (99.6, "2 min"),
        (3599, "1 h 00 min"),
        (3900, "1 h 05 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(1520, "1,520"), (999.6, "1,000")])
def test_count(count: float, text: str) -> None:
    assert units.format_count(count) == text


@pytest.mark.parametrize(
    ("gib", "text"),
    [
        ((139.82,), "139.8 GiB"),
        ((0.4249,), "0.42 GiB"),
        ((0.014,), "14.3 MiB"),
        ((4e-6,), "4.19 KiB"),
        ((0.0,), "0.00 GiB"),
        ((20.0, 2), "20.00 GiB"),
    ],
)
def test_memory(gib: tuple[float, ...], text: str) -> None:
    assert units.format_gib(*gib) == text  # type: ignore[arg-type]


@given(st.floats(1e-3, 1e4), st.floats(1e-4, 1e3))
def test_a_printed_interval_is_never_narrower_than_the_real_one(ms: float, half_width: float) -> None:
    text = units.format_ms(ms, (ms - half_width, ms + half_width))
    shown = float(text.split(" ± ")[1].replace(",", ""))
    assert shown >= half_width * (1 - 1e-6) - 1e-6


@given(st.floats(-1e6, 1e6), st.integers(0, 3))
def test_numbers_read_back_as_rounded(value: float, decimals: int) -> None:
    text = units.format_number(value, decimals).replace(",", "").replace(units.MINUS, "-")
    assert float(text) == pytest.approx(round(value, decimals), abs=1e-9)
    assert text != "-" + "0" * len(text[1:])


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (1.1577, "1.16"),
        (0.04, "0.0400"),
        (6e-7, "0.000000600"),
        (99.4, "99.4"),
        (999.6, "1,000"),
        (1520.3, "1,520"),
        (0.0, "0"),
    ],
)
def test_a_small_rate_keeps_its_digits(rate: float, text: str) -> None:
    assert units.format_rate(rate) == text


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [(2.345, 2, "2.35"), (0.000127, 2, "0.00013"), (0.0219, 1, "0.022"), (0.5, 0, "0.50"), (0.0, 2, "0.00"),
     (1e-9, 2, "0.000000")],
)  # fmt: skip
def test_a_small_figure_shows_two_digits(value: float, decimals: int, text: str) -> None:
    assert units.format_number(value, units.least_decimals(value, decimals)) == text


def test_a_list_is_joined_by_a_word() -> None:
    assert [units.listed(list("abc")[:num]) for num in range(4)] == ["", "a", "a and b", "a, b and c"]


@given(st.lists(st.floats(0, 1e4), max_size=12))
def test_parts_in_whole_numbers_add_up_to_their_rounded_sum(parts: list[float]) -> None:
    found = units.whole_parts(parts)
    assert sum(found) == math.floor(sum(parts) + 0.5)
    assert all(abs(whole - part) <= 1 for whole, part in zip(found, parts, strict=True))
