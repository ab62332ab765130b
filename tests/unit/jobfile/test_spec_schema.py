"""Schema, reference and template say what the program does."""

from pathlib import Path

import pytest

from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.jobfile.model import SECTIONS, JobSpec
from gpurun.launcher.jobfile.schema import job_reference, job_schema, job_template
from gpurun.launcher.jobfile.section import Section

ROOT = Path(__file__).resolve().parents[3]


def test_every_key_has_a_description() -> None:
    schema = job_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) == set(JobSpec.keys)
    for name, section in SECTIONS.items():
        part = schema["$defs"][section.__name__]
        assert set(part["properties"]) == set(section.keys)
        assert all(len(value["description"]) > 10 for value in part["properties"].values()), name
    assert all(len(value["description"]) > 10 for value in schema["properties"].values())


def test_the_schema_allows_what_the_program_allows() -> None:
    schema = job_schema()
    assert schema["oneOf"] == [{"required": [key]} for key in ("workload", "script", "module")]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["timeout"]["default"] == "10m"
    assert schema["properties"]["precision"]["enum"] == ["fp64", "fp32", "tf32", "bf16", "fp16"]
    strategies = schema["$defs"]["Compare"]["properties"]["strategy"]["items"]["enum"]
    assert strategies == ["single", "dp", "ddp", "zero1", "fsdp", "hsdp"]


def test_docs_hold_the_reference_as_it_is_made() -> None:
    made = job_reference()  # to renew the file, write this text into it
    assert (ROOT / "docs" / "job-file.md").read_text() == made


def test_the_reference_names_every_key() -> None:
    text = job_reference()
    models: tuple[type[Section], ...] = (JobSpec, *SECTIONS.values())
    for model in models:
        assert all(f"| `{key}` |" in text for key in model.keys)


def test_the_template_is_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job_template())
    spec = load_job(path)
    assert spec.compare.split == ("even",)
    assert spec.timeout_s == 600.0
    keys = [line for line in job_template().splitlines() if line[:1].isalpha()]
    assert keys
    assert all(" # " in line for line in keys)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_job(path: Path) -> None:
    load_job(path)
