"""Figures as people read them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher import units

TEXTS: list[tuple[Callable[..., str], tuple[object, ...], str]] = [
    (units.format_ms, (42.123, (41.9, 42.3)), "42.1 ± 0.3"),
    (units.format_ms, (42.1, (41.9, 42.3)), "42.1 ± 0.2"),
    (units.format_ms, (1234.5, (1200.0, 1250.0)), "1,234 ± 35"),
    (units.format_ms, (0.05123, (0.05120, 0.05125)), "0.051 ± 0.001"),
    (units.format_ms, (5.0, (5.0, 5.0)), "5.000 ± 0.000"),
    (units.format_ms, (42.123, None), "42.1"),
    (units.format_ms, (1234.5, None), "1,234"),
    (units.format_ms, (0.0512, None), "0.051"),
    (units.format_percent, (13.78, (12.9, 14.6), False), "13.8 %"),
    (units.format_percent, (12.4, (10.6, 13.4), False), "12 %"),
    (units.format_percent, (0.31, (-0.4, 0.9), True), "+0.3 %"),
    (units.format_percent, (-0.31, (-0.9, 0.4), True), "\u22120.3 %"),
    (units.format_percent, (-0.001, (-0.4, 0.4), True), "0.0 %"),
    (units.format_percent, (0.123456, (0.1234, 0.1235), False), "0.12 %"),
    (units.format_percent, (45.3, None, False), "45 %"),
    (units.format_percent, (0.34, None, False), "0.3 %"),
    (units.format_percent_interval, (13.78, (12.9, 14.6)), "12.9 to 14.6"),
    (units.format_percent_interval, (8.0, (0.3, 16.2)), "0.3 to 16"),
    (units.format_percent_interval, (8.0, (0.004, 16.2)), "0.004 to 16"),
    (units.format_percent_interval, (8.0, (0.0, 16.2)), "0 to 16"),
    (units.format_percent_interval, (0.3, (-0.4, 0.9)), "\u22120.4 to +0.9"),
    (units.format_percent_interval, (-3.0, (-3.9, -2.1)), "\u22123.9 to \u22122.1"),
    (units.format_duration, (0.42,), "0.4 s"),
    (units.format_duration, (9.96,), "10 s"),
    (units.format_duration, (50,), "50 s"),
    (units.format_duration, (99.6,), "2 min"),
    (units.format_duration, (3599,), "1 h 00 min"),
    (units.format_duration, (3900,), "1 h 05 min"),
    (units.format_count, (1520,), "1,520"),
    (units.format_count, (999.6,), "1,000"),
    (units.format_gib, (139.82,), "139.8 GiB"),
    (units.format_gib, (0.4249,), "0.42 GiB"),
    (units.format_gib, (0.014,), "14.3 MiB"),
    (units.format_gib, (4e-6,), "4.19 KiB"),
    (units.format_gib, (0.0,), "0.00 GiB"),
    (units.format_gib, (20.0, 2), "20.00 GiB"),
    (units.format_rate, (1.1577,), "1.16"),
    (units.format_rate, (0.04,), "0.0400"),
    (units.format_rate, (6e-7,), "0.000000600"),
    (units.format_rate, (99.4,), "99.4"),
    (units.format_rate, (999.6,), "1,000"),
    (units.format_rate, (1520.3,), "1,520"),
    (units.format_rate, (0.0,), "0"),
    (units.ranks_text, ((2,),), "rank 2"),
    (units.ranks_text, ((0, 1, 3),), "ranks 0, 1, 3"),
    (units.ranks_text, ((*range(31), 32),), "ranks 0–30, 32"),
]


@pytest.mark.parametrize(("to_text", "figures", "text"), TEXTS)
def test_figures_have_the_digits_that_are_known_and_their_unit(
    to_text: Callable[..., str], figures: tuple[object, ...], text: str
) -> None:
    assert to_text(*figures) == text


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
    assert sum(found) == round(sum(parts))
    assert all(abs(whole - part) <= 1 for whole, part in zip(found, parts, strict=True))
