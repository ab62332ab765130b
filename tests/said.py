"""What a comparison says, for tests that look for it."""

from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.findings.finding import of_level
from gpurun.launcher.trace.diff import TraceDiff
from gpurun.launcher.trace.model import TraceReport

OF_VARIANTS = ("variant-failed", "slower", "nothing-left", "act-on-cause")


def notes_of(comparison: Comparison) -> tuple[str, ...]:
    """Sentences about the run itself, without the answer and its causes."""
    found = (each for each in comparison.findings if each.level not in ("answer", "cause"))
    found = (each for each in found if each.code not in OF_VARIANTS)
    return tuple(each.sentence for each in found if "variants" not in each.figures)


def warnings_of(comparison: Comparison, variant: VariantResult) -> tuple[str, ...]:
    """What was noticed about a variant."""
    found = (each for each in comparison.findings if each.code != "gradient-differs")
    found = (each for each in found if variant.id in each.figures.get("variants", ()))
    return tuple(each.text.removeprefix(each.figures["of"]) for each in found)


def trace_notes(report: TraceReport | TraceDiff) -> tuple[str, ...]:
    """What was noticed about traces."""
    return tuple(each.text for each in of_level(report.findings, "detail"))
