"""The list of built-in workloads: complete, explained, and made without torch."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.kinds import builtin_workloads
from gpurun.launcher.jobfile.params import (
    catalogue,
    read_module,
    render_catalogue,
    render_entry,
    signature_of,
    workload_reference,
)
from tests.known import known
from tests.wording import Wording

ROOT = Path(__file__).resolve().parents[3]


def test_docs_hold_the_catalogue_as_it_is_made() -> None:
    assert (ROOT / "docs" / "workloads.md").read_text() == workload_reference()  # to renew it: make docs


def test_the_catalogue_has_every_workload_and_every_parameter() -> None:
    entries = {entry.name: entry for entry in catalogue()}
    assert entries.keys() == builtin_workloads().keys()
    assert all(entry.bound_by and entry.about and entry.summary for entry in entries.values())
    assert all(param.meaning and param.default for entry in entries.values() for param in entry.params)
    assert entries["gpt"].params[0].default == "'tiny'"
    assert entries["fcn_s"].global_batch == 64
    assert entries["allreduce"].kind == "micro-benchmark"
    assert all(len(line) <= 60 for line in render_catalogue(60).splitlines())


def test_one_workload_is_shown_with_what_its_parameters_mean(wording: Wording) -> None:
    shown = CliRunner().invoke(cli, ["workloads", "gpt"]).output
    (entry,) = [entry for entry in catalogue() if entry.name == "gpt"]
    wording(shown)
    assert all(f"\n  {param.name}={param.default}\n" in shown for param in entry.params)
    assert "resnet50" not in shown
    assert all(len(line) <= 40 for line in render_entry(entry, 40).splitlines())
    listed = json.loads(CliRunner().invoke(cli, ["workloads", "lstm", "gpt", "--json"]).output)
    assert [one["name"] for one in listed["workloads"]] == ["gpt", "lstm"]


@pytest.mark.parametrize("words", [["gtp"], ["gpt", "zzz"]])
def test_names_that_are_no_workloads_are_mistakes(words: list[str], wording: Wording) -> None:
    refused = CliRunner().invoke(cli, ["workloads", *words])
    assert isinstance(refused.exception, SpecError)
    wording(str(refused.exception))


def test_listing_needs_no_torch() -> None:
    program = dedent("""
        import sys
        sys.modules["torch"] = None
        sys.argv = ["gpurun", "workloads", "--json"]
        from gpurun.launcher.cli.main import main
        main()
    """)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, cwd=ROOT)
    listed = json.loads(done.stdout)
    assert [entry["name"] for entry in listed["workloads"]] == list(builtin_workloads())


def test_defaults_are_in_the_signature() -> None:
    module = known(read_module(ROOT / "workloads" / "gpt.py"))
    signature = known(signature_of(module, "build"))
    assert {param.name: param.default for param in signature.params}["learning_rate"] == "0.0003"
