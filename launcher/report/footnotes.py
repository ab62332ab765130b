"""Sentences with every table, the same in terminal, Markdown and tab: how it was measured, and details.

Also the difference to the baseline, in the cells of tables: verdict, uncertainty and factor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, floor, log10
from sys import float_info
from typing import Any

from rich.text import Text

from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison, Difference, Noise, VariantResult
from gpurun.launcher.compare.ranking import is_ranked
from gpurun.launcher.findings.finding import below_its_name, ranked, screen_of
from gpurun.launcher.grouping import grouped
from gpurun.launcher.jobfile.values import node_bounds
from gpurun.launcher.trace.causes import to_do
from gpurun.launcher.units import (
    HALF,
    LOPSIDED,
    TWICE,
    Interval,
    format_duration,
    format_factor,
    format_factor_interval,
    format_number,
    format_percent,
    format_percent_interval,
    half_width,
    is_lopsided,
    least_decimals,
    listed,
    more_speed,
    plural,
    round_up,
)

WIDE = 5.0
"""Percentage points of an interval's half from which on one ± would hide which of its sides is longer."""
AS_LONG = 1.1
"""How many times as long one side may be as the other then."""
VERDICT_STYLES = {"faster": "green", "slower": "yellow", "same": "dim", "inconclusive": "dim", "baseline": ""}


def interval_text(interval: Interval) -> str:
    """`−0.4 to +0.7`."""
    return f"{format_number(interval[0], 1, signed=True)} to {format_number(interval[1], 1, signed=True)}"


def difference_texts(difference: Difference | None) -> tuple[Text, Text]:
    """Verdict and uncertainty, as precise as the interval supports, as in the answer.

    The first is `13.8 % slower`, `+0.3 % same` or `baseline`: `faster` and `slower` carry the direction; the
    other verdicts don't, so their figure has its sign. The second is `0.8`, in percentage points, or both
    ends, `13 to 57`; nothing for the baseline itself.
    """
    if difference is None:
        return Text(""), Text("")
    verdict, percent, ci = difference.verdict, difference.percent, difference.ci
    style = VERDICT_STYLES[verdict]
    if verdict == "baseline" or percent is None:
        return Text(verdict, style), Text("")
    if verdict == "faster":
        percent, ci = -percent, ci and (-ci[1], -ci[0])
    factor: tuple[float, Interval | None, str] | None = None
    if verdict == "slower" and percent >= TWICE:
        factor = percent, ci, "as long"
    elif verdict == "faster" and percent >= HALF and ci:
        factor = more_speed((percent, percent))[0], more_speed(ci), "as fast"
    if factor:
        percent, ci, words = factor
        uncertainty = format_factor_interval(ci) if ci else ""
        return Text(f"{format_factor(percent, ci)} {words}", style), Text(uncertainty, "dim")
    shown = format_percent(percent, ci, signed=verdict not in ("faster", "slower"))
    return Text(f"{shown} {verdict}", style), Text(_percent_points(percent, ci) if ci else "", "dim")


def _percent_points(percent: float, ci: Interval) -> str:
    """Half of the interval, or both of its ends where one side is much longer."""
    half = half_width(percent, ci)
    if is_lopsided(percent, ci, AS_LONG if half > WIDE else LOPSIDED):
        return format_percent_interval(percent, ci)
    return format_number(round_up(half, 1), 1)


def factor_text(difference: Difference | None) -> Text:
    """`1.83×`: how many steps fit into one of the baseline's; only where a difference is established."""
    if difference is None or difference.percent is None or difference.verdict not in ("faster", "slower"):
        return Text("")
    return Text(f"{format_number(100 / (100 + difference.percent), 2)}×", "dim")


DISAGREEMENT = 0.05
"""Relative gradient error from which "agree" would be the wrong word, whatever the precision."""


def measured_line(comparison: Comparison) -> str:
    """How it was measured: `6 launches in 36 s, 95 % CI, noise −5.9 to +3.8 %, gradients agree to 2e-7`."""
    known = [result for result in comparison.variants if result.step_ms]
    launches = [result.launches for result in known]
    rounds = [result.rounds for result in known if not result.kind.runs_program and result.launches == 1]
    parts = [_range(nums, noun) for nums, noun in ((launches, "launch"), (rounds, "round")) if any(nums)]
    if parts and comparison.gate is not None:
        parts[0] += " of each version"
    if parts and comparison.complete and comparison.measured_s and max(launches) > 1:
        parts[0] += f" in {format_duration(comparison.measured_s)}"
    if any(result.step_ms and result.step_ms.ci for result in known if is_ranked(result)):
        parts.append("95 % CI")
    if comparison.noise.ci is not None:
        parts.append(f"noise {interval_text(comparison.noise.ci)} %")
    errors = [
        result.gradient_error
        for result in known
        if result.gradient_error is not None and not result.compression
    ]
    are_wrong = any(each.code in ("gradient-differs", "gradient-not-exact") for each in comparison.findings)
    if are_wrong:
        parts.append("gradients don't all agree")
    elif errors and max(errors) <= DISAGREEMENT:
        parts.append(f"gradients agree{_closely(max(errors))}")
    elif errors:
        parts.append(f"gradients differ by up to {max(errors):.2g}")
    return ", ".join(parts)


def _range(nums: Sequence[int], noun: str) -> str:
    """`6 launches`, `1 to 6 launches`."""
    least, most = min(nums), max(nums)
    return f"{f'{least} to ' if least < most else ''}{plural(most, noun)}"


def _closely(error: float) -> str:
    """` to 2e-7`; nothing where they are the same."""
    return "" if error <= 0 else f" to {_one_digit_up(error)}"


def with_next_step(
    comparison: Comparison, name: str, in_progress: Mapping[str, Any] | None = None
) -> Comparison:
    """The comparison; of a run that isn't complete the next step is to go on with it.

    Args:
        comparison: of the run.
        name: of its directory.
        in_progress: the case of the next step where a command works on the run now, and its figures.
    """
    if comparison.complete:
        return comparison
    step = to_do("not-measured", weight=1, **(in_progress or _to_complete(comparison, name)))
    return replace(comparison, findings=ranked((step, *comparison.findings)))


def _to_complete(comparison: Comparison, name: str) -> Mapping[str, Any]:
    """The case of the advice for a run that was stopped, and its figures; a gate's versions are gone."""
    if comparison.gate is not None:
        return {"case": "gate-again"}
    if node_bounds(comparison.job.get("nodes") or 1)[1] <= 1:
        return {"case": "resume", "command": "gpurun tune" if comparison.search else "gpurun"}
    from gpurun.launcher.schedulers import how_to_requeue  # few runs need it

    command, scheduler = how_to_requeue(name) or (None, None)
    return {"case": "resume-nodes", "requeue": command, "scheduler": scheduler}


def detail_lines(comparison: Comparison, with_codes: bool = False) -> list[str]:
    """Sentences that reports show on request: how it was measured, and other findings, by variant.

    `with_codes`: each with its code, for `gpurun explain`, below the name of its variant.
    """
    details = screen_of(comparison.findings).details
    names = {result.id: variant_label(result) for result in comparison.variants}
    lines = [
        *noise_lines(comparison.noise, "The baseline" if len(comparison.variants) > 1 else "The step time"),
        *interval_lines(comparison),
        *gradient_lines(comparison),
    ]
    for variant in (None, *names):
        about = [each for each in details if (each.variant if each.variant in names else None) == variant]
        is_group = variant is not None and with_codes
        if variant is not None and is_group and about:
            lines.append(f"{names[variant]}:")
            about = [below_its_name(each) for each in about]
        indent = "  " if is_group else ""
        code = " [{}]" if with_codes else ""
        lines += [f"{indent}{each.sentence}{code.format(each.code)}" for each in about]
    return lines


def noise_lines(noise: Noise, who: str) -> list[str]:
    """How much the same thing differs from itself, and the scatter of `who`, which was launched again."""
    lines = []
    if noise.aa_percent is not None:
        interval = f" ({interval_text(noise.ci)})" if noise.ci else ""
        percent = format_number(noise.aa_percent, 1)
        lines.append(f"Noise: the same split measured twice differs by {percent} %{interval}.")
    launches, rounds = noise.launch_scatter_percent, noise.round_scatter_percent
    is_hidden = launches == 0 and bool(rounds)  # 0: rounds hide it, not that there is none
    parts = {
        "between launches": None if is_hidden else launches,
        "between the rounds of a launch": rounds,
    }
    known = [
        f"{format_number(percent, least_decimals(percent, 1))} % {where}"
        for where, percent in parts.items()
        if percent is not None
    ]
    hidden = "; its launches differ by no more than that explains" if is_hidden else ""
    scatter = f"{who} scatters by {', '.join(known)} (standard deviation){hidden}."
    return [*lines, scatter] if known else lines


OVER_LAUNCHES = "over launches"
OVER_ROUNDS = "over rounds"


def interval_lines(comparison: Comparison) -> list[str]:
    """The kind and the level of the intervals: those of steps, and those that verdicts rest on."""
    lines = []
    points = [
        point
        for variant in comparison.variants
        if variant.probe
        for c in variant.probe.curves
        for point in c.points
    ]
    if any(point.ci_us for point in points):
        lines.append("Next to each time is the 95 % interval of its median over rounds.")
    known = [variant for variant in comparison.variants if variant.step_ms and variant.step_ms.ci]
    over = OVER_LAUNCHES if comparison.unit == "launch" else OVER_ROUNDS
    if any(
        not variant.kind.runs_program or len(variant.launch_ms) > 1 for variant in known
    ):  # others have a note
        of_step = OVER_LAUNCHES if any(len(variant.launch_ms) > 1 for variant in known) else OVER_ROUNDS
        lines.append(_step_interval(of_step, over if comparison.noise.ci else None))
    if comparison.ci_level is not None and any(v.vs_baseline and v.vs_baseline.ci for v in known):
        lines.append(confidence_text(comparison.ci_level, over=over))
    return lines


def _step_interval(of_step: str, of_noise: str | None) -> str:
    if of_step == of_noise:
        return f"The ± of a step and the range of the noise are 95 % intervals {of_step}."
    noise = f"; the range of the noise is one {of_noise}" if of_noise else ""
    return f"The ± of a step is its 95 % interval {of_step}{noise}."


def confidence_text(together: float, each: float | None = None, over: str = OVER_LAUNCHES) -> str:
    """The confidence of a table's verdicts, and of each by itself where all have one level."""
    level = "" if each is None or each == together else f" ({100 * each:.1f} %)"
    return (
        f"All verdicts together have {100 * together:.0f} % confidence; "
        f"the ± next to each is the interval {over} that decides it{level}."
    )


def gradient_lines(comparison: Comparison) -> list[str]:
    """One sentence per reference that gradients agree with; of those that don't there are findings."""
    variants = comparison.variants
    inexact = (each for each in comparison.findings if each.code == "gradient-not-exact")
    wrong = {variant for each in inexact for variant in each.about}
    exact = [
        variant
        for variant in variants
        if variant.gradient_error is not None
        and not (variant.compression or variant.gradient_warning or variant.id in wrong)
    ]
    by_reference = grouped(exact, lambda variant: variant.gradient_reference or "one device")
    names = {variant.id: variant_label(variant) for variant in variants}
    compressed = [variant for variant in variants if variant.compression]
    num_checked = sum(variant.gradient_error is not None for variant in variants if not variant.compression)
    are_all = sum(map(len, by_reference.values())) == num_checked
    agreed = (_agreement(found, other, names, are_all) for other, found in by_reference.items())
    return [*agreed, *_all_compressed(compressed, names)]


MOST_COMPRESSED = 3
"""Variants with a sentence each; of more, the table has the errors."""


def _all_compressed(variants: list[VariantResult], names: Mapping[str, str]) -> list[str]:
    found = [(variant, variant.gradient_error) for variant in variants if variant.gradient_error is not None]
    references = {variant.gradient_reference or "one device" for variant, _ in found}
    groups = [found] if len(found) > MOST_COMPRESSED and len(references) == 1 else [[pair] for pair in found]
    unknown = (variant_label(variant) for variant in variants if variant.gradient_error is None)
    return [
        *(_compressed(group, names) for group in groups),
        *(
            f"Gradients of {label} are compressed; by how much they differ for that isn't known."
            for label in unknown
        ),
    ]


def _compressed(found: list[tuple[VariantResult, float]], names: Mapping[str, str]) -> str:
    """How far gradients of one variant, or of several with one reference, are from those of that."""
    first, errors = found[0][0], sorted(error for _, error in found)
    which = variant_label(first) if len(found) == 1 else plural(len(found), "variant")
    by = " to ".join(dict.fromkeys(f"{error:.2g}" for error in (errors[0], errors[-1])))
    reference = first.gradient_reference or "one device"
    whose = names.get(reference, reference)
    return f"Compressed gradients of {which} differ from those of {whose} by {by} (relative)."


def _agreement(variants: list[VariantResult], reference: str, names: Mapping[str, str], are_all: bool) -> str:
    """Whose gradients agree is said where those of others don't: these have a warning."""
    worst = max(variants, key=lambda variant: variant.gradient_error or 0.0)
    error = max(worst.gradient_error or 0.0, 0.0)
    other = names.get(reference, reference)
    if error > DISAGREEMENT:
        return f"Gradients of {variant_label(worst)} differ from those of {other} by {error:.2g} (relative)."
    whose = "" if are_all else f" of {listed([names[result.id] for result in variants])}"
    return f"Gradients{whose} agree with {other}{_closely(error) or ' exactly'}."


def _one_digit_up(error: float) -> str:
    """One significant digit, rounded up so that the claim holds: `2e-7`."""
    error = max(error, float_info.min)  # below it, powers of ten vanish
    exponent = floor(log10(error))
    digit = ceil(error / 10**exponent)
    if digit == 10:
        digit, exponent = 1, exponent + 1
    return f"{digit}e{exponent}" if exponent < -2 else f"{digit * 10**exponent:g}"
