"""The types that the page has of a comparison are those of the server: a renamed field is renamed in both."""

import re
from dataclasses import fields
from typing import Any, get_args

import pytest

from gpurun.launcher.compare import model
from gpurun.launcher.compare.figures import size_curves
from gpurun.launcher.compare.figures.ranks import RankFigures
from gpurun.launcher.rundir.records import Status
from gpurun.launcher.tensorboard_plugin.html import STATIC

TYPES = (STATIC / "types.d.ts").read_text(encoding="utf-8")
DATACLASSES = (
    size_curves.Balanced, size_curves.BatchCurve, size_curves.BatchPoint, size_curves.DeviceCost,
    model.Comparison, model.Difference, model.Noise, RankFigures, model.VariantResult,
)  # fmt: skip


def interface(name: str) -> dict[str, str]:
    """The fields of an interface and their types."""
    found = re.search(rf"(?ms)^interface {name} \{{\n(.*?)^\}}", TYPES)
    assert found, name
    return dict(re.findall(r"(?m)^  (\w+)\??: (.+);$", found[1]))


@pytest.mark.parametrize("of", DATACLASSES, ids=lambda each: each.__name__)
def test_fields_and_what_may_be_null_are_the_same_on_both_sides(of: Any) -> None:
    python = {field.name: type(None) in get_args(field.type) for field in fields(of)}
    page = {name: text.endswith("| null") for name, text in interface(of.__name__).items()}
    assert page.items() <= python.items()


def test_words_for_verdict_and_status_are_the_same_on_both_sides() -> None:
    for name, words in (("Verdict", model.Verdict), ("VariantStatus", Status)):
        found = re.search(rf"(?m)^type {name} = (.+);$", TYPES)
        assert found
        page = set(re.findall(r"'(\w+)'", found[1]))
        assert page - {"planned", "running"} == set(get_args(words))
