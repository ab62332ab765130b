"""Job files: what a right one becomes, and what is said of a wrong one."""

import errno
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile import values
from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.jobfile.model import SECTIONS, JobSpec
from gpurun.launcher.jobfile.schema import improvement_schema, job_reference, job_schema, job_template
from gpurun.launcher.jobfile.section import Section
from gpurun.launcher.jobfile.yaml.tree import Source, Unreadable, override_source, parse_source, read_source
from gpurun.launcher.rundir.improvement import Improvement
from tests.wording import Wording

SMALL = "workload: gpt\nglobal_batch: 64\n"


def job(directory: Path, text: str, *overrides: str) -> JobSpec:
    path = directory / "job.yaml"
    path.write_text(text)
    return load_job(path, overrides)


def mistakes(directory: Path, text: str, *overrides: str) -> str:
    """All that is said of the file, without the directory's name."""
    with pytest.raises(SpecError) as caught:
        job(directory, text, *overrides)
    return str(caught.value).replace(f"{directory}/", "")


def test_defaults(tmp_path: Path) -> None:
    spec = job(tmp_path, SMALL)
    assert (spec.name, spec.devices, spec.strategy, spec.split) == ("job", "auto", "ddp", "even")
    assert (spec.precision, spec.accumulate, spec.seed, spec.device_count) == ("fp32", 1, 0, None)
    assert (spec.steps.warmup, spec.steps.rounds, spec.steps.launches) == (0, 28, None)
    assert (spec.until, spec.budget_s, spec.has_fixed_size) == ("decided", 180.0, False)
    assert (spec.profile.steps, spec.profile.stacks, spec.timeout_s, spec.gradient_check) == (
        3,
        False,
        600.0,
        True,
    )


FULL = """\
name: gpt-splits
workload: gpt
params: {layers: 4, width: 256}
devices: [cuda:0, cuda:01]
global_batch: 64
precision: bf16
compare:
  strategy: [ddp, dp]
  device_count: [1, 2]
  split: [even, [48, 16], "3:1", 1:1]
  params: [{}, {layers: 2}]
baseline: {strategy: ddp, split: even, params: {layers: 2}}
steps: {warmup: 5, rounds: 14, launches: 8}
profile: {steps: 0}
timeout: 1.5h
gradient_check: false
"""


def test_every_key_arrives(tmp_path: Path) -> None:
    spec = job(tmp_path, FULL)
    assert spec.devices == ("cuda:0", "cuda:1")
    assert spec.compare.split == ("even", (48, 16), "3:1", "1:1")
    assert spec.compare.params == ({}, {"layers": 2})
    assert spec.baseline is not None
    assert spec.baseline.params == {"layers": 2}
    assert spec.timeout_s == 5400.0
    assert spec.steps.launches == 8


@pytest.mark.parametrize(
    ("more", "is_fixed", "resolved"),
    [
        ("", False, {"until": "decided", "budget": 180.0}),
        ("budget: 100s", False, {"until": "decided", "budget": 100.0}),
        ("until: fixed", True, {"until": "fixed"}),
        ("steps: {rounds: 3}", True, {"until": "fixed"}),
        ("steps: {launches: 3}", True, {"until": "fixed"}),
        ("steps: {warmup: 3}", False, {"until": "decided", "budget": 180.0}),
    ],
)
def test_a_size_takes_the_place_of_the_budget(
    tmp_path: Path, more: str, is_fixed: bool, resolved: dict[str, Any]
) -> None:
    spec = job(tmp_path, f"{SMALL}{more}\n")
    assert spec.has_fixed_size is is_fixed
    plain = spec.resolved()
    assert {key: plain[key] for key in ("until", "budget") if key in plain} == resolved
    assert ("rounds" in plain["steps"]) is is_fixed
    again = job(tmp_path, json.dumps(plain))
    assert (again.has_fixed_size, again.resolved()) == (is_fixed, plain)


@pytest.mark.parametrize(
    "more",
    ["budget: 1m\nsteps: {rounds: 3}", "budget: 1m\nuntil: fixed", "until: decided\nsteps: {launches: 3}"],
)
def test_a_budget_for_a_fixed_size_is_a_mistake(tmp_path: Path, more: str, wording: Wording) -> None:
    wording(mistakes(tmp_path, f"{SMALL}{more}\n"))


def test_the_resolved_job_is_plain_data_and_loads_again(tmp_path: Path) -> None:
    first = job(tmp_path, FULL).resolved()
    again = job(tmp_path, json.dumps(first)).resolved()
    assert again == first
    assert first["timeout"] == 5400.0
    assert set(first["compare"]) == {"strategy", "device_count", "split", "params"}


@pytest.mark.parametrize(
    ("file", "name"),
    [("my job (1).yaml", "my-job-1"), ("...yaml", "job"), ("a.b.yaml", "a.b"), ("größe.yml", "größe")],
)
def test_the_name_comes_from_the_file(tmp_path: Path, file: str, name: str) -> None:
    path = tmp_path / file
    path.write_text(SMALL)
    assert load_job(path).name == name


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90.0), ("10m", 600.0), ("1h", 3600.0), ("45", 45.0), ("0.5", 0.5), ("1 m", 60.0)],
)
def test_durations(tmp_path: Path, text: str, seconds: float) -> None:
    assert job(tmp_path, f"{SMALL}timeout: {text}\n").timeout_s == seconds


def test_missing_keys_are_reported_at_the_top(tmp_path: Path, wording: Wording) -> None:
    found = mistakes(tmp_path, "\n\nname: x\n")
    wording(found)
    assert "job.yaml:3:1: missing key `global_batch`" in found


@pytest.mark.parametrize("text", ["[1, 2]", "hello", "- workload: gpt\n- global_batch: 64", "7"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, wording: Wording) -> None:
    wording(mistakes(tmp_path, text))


def test_a_flood_of_mistakes_is_cut(tmp_path: Path, wording: Wording) -> None:
    found = mistakes(tmp_path, SMALL + "".join(f"key{n}: 1\n" for n in range(1000)))
    assert found.count("unknown key") == 30
    assert found.endswith("and 970 more mistakes")
    found = mistakes(tmp_path, f"{SMALL}compare: {{seed: {['x'] * 101}}}\n")
    wording(found)


def test_overrides_follow_the_same_rules(tmp_path: Path) -> None:
    spec = job(
        tmp_path, SMALL, "global_batch=9", "compare.split=[even, 3:1]", "steps.rounds=7", "params.width=8"
    )
    assert (spec.global_batch, spec.compare.split, spec.steps.rounds) == (9, ("even", "3:1"), 7)
    assert spec.params == {"width": 8}


def test_an_override_of_another_key_leaves_the_rest(tmp_path: Path) -> None:
    text = SMALL + "compare: {split: [even, '3:1']}\n"
    assert job(tmp_path, text, "compare.split=[[10, 54]]", "seed=3").compare.split == ((10, 54),)


def test_an_override_with_null_removes_the_key(tmp_path: Path) -> None:
    text = SMALL + "seed: 3\nparams: {width: 8}\ncompare: {split: [even, '3:1'], precision: [fp32, bf16]}\n"
    spec = job(tmp_path, text, "seed=null", "compare.split=null", "params=null")
    assert (spec.seed, spec.params, spec.compare.split, len(spec.compare.precision)) == (0, {}, (), 2)
    for key in ("sed", "compare.splt", "compare.split.0", "steps.rounds"):
        assert f"--set {key}: " in mistakes(tmp_path, text, f"{key}=null")


@pytest.mark.parametrize(
    ("size", "override", "is_fixed"),
    [
        ("until: decided\nbudget: 3m\n", "steps.rounds=12", True),
        ("budget: 3m\nsteps: {warmup: 20}\n", "steps.launches=6", True),
        ("steps: {rounds: 28, launches: 6}\n", "budget=20s", False),
        ("steps: {rounds: 28, warmup: 20}\n", "until=decided", False),
    ],
)
def test_an_override_that_says_how_much_is_measured_replaces_what_the_file_says(
    tmp_path: Path, size: str, override: str, is_fixed: bool
) -> None:
    text = SMALL + "compare: {split: [even, '3:1']}\n" + size
    spec = job(tmp_path, text, override)
    assert spec.has_fixed_size == is_fixed
    assert spec.steps.warmup == (20 if "warmup" in size else 0)
    assert "has no effect with" in mistakes(tmp_path, text, "steps.rounds=12", "budget=20s")


def test_a_split_may_fit_one_of_several_batches(tmp_path: Path) -> None:
    spec = job(tmp_path, f"{SMALL}compare: {{global_batch: [64, 32], split: [even, [24, 8]]}}\n")
    assert spec.compare.split == ("even", (24, 8))


def test_a_file_next_to_the_job_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def build(): ...\n")
    assert job(tmp_path, "workload: train.py:build\nglobal_batch: 4\n").workload == "train.py:build"


def test_the_baseline_may_be_called_by_another_name(tmp_path: Path) -> None:
    spec = job(tmp_path, f"{SMALL}split: [32, 32]\nbaseline: {{split: even}}\n")
    assert spec.baseline is not None
    assert spec.baseline.split == "even"


def test_gpus_are_sold_in_gigabytes_and_sizes_are_as_written() -> None:
    assert values.parse_memory("H100 80GB") == 80 * 10**9
    assert values.parse_memory("80 GiB") == 80 * 2**30


# YAML text: what its scalars mean, where things are, and what is refused


BOMB = "a: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"b{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)


def data_of(text: str) -> Any:
    source = parse_source(text.encode(), "job.yaml")
    assert source.problems == ()
    return source.root.plain()


def refusal(content: bytes) -> str:
    """All that is wrong with the file, in one text."""
    try:
        source = parse_source(content, "job.yaml")
    except SpecError as error:
        return str(error)
    return "\n".join(map(str, source.problems))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3:1", "3:1"),
        ("no", "no"),
        ("on", "on"),
        ("1e-3", 1e-3),
        ("1_000", "1_000"),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-7", -7),
        ("+.5", 0.5),
        ("1.", 1.0),
        ("~", None),
        ("TRUE", True),
        ("false", False),
        ("'64'", "64"),
        ("!!str 64", "64"),
        ("!!float 1", 1),
        ("2001-12-14", "2001-12-14"),
        ("<<", "<<"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    got = data_of(f"k: {text}")["k"]
    assert got == value
    assert type(got) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives(number: float) -> None:
    assert data_of(f"k: {number!r}")["k"] == number


@given(st.integers(-(2**63), 2**64 - 1))
def test_every_integer_survives(number: int) -> None:
    assert data_of(f"k: {number}")["k"] == number


def test_positions_of_keys_and_values() -> None:
    source = parse_source(b"a: 1\nb:\n  - x\n  - {c: [7, 8]}\n", "job.yaml")
    assert str(source.problem(("b", 1, "c", 1), "here")) == "job.yaml:4:13: here"
    assert str(source.key_problem(("b", 1, "c"), "here")) == "job.yaml:4:6: here"
    assert str(source.problem(("b", 1, "missing"), "here")) == "job.yaml:4:5: here"
    assert str(source.problem(("nothing",), "here")) == "job.yaml:1:1: here"


def test_aliases_are_written_out() -> None:
    assert data_of("a: &x {k: [1]}\nb: *x\n") == {"a": {"k": [1]}, "b": {"k": [1]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "job.yaml: the file is empty"),
        (b"# nothing\n", "job.yaml: the file is empty"),
        (b"a: 'x", "job.yaml:1:6: invalid YAML"),
        (b"a:\n\t- b", "job.yaml:2:1: a tab in the indentation\n.*not tabs"),
        (b"a: b: c", "job.yaml:1:4: a `: ` within a value that has no quotes"),
        (b"a: 1\na: 2\n", r"job.yaml:2:1: duplicate key `a` \(first on line 1\)"),
        (BOMB.encode(), "more than 10,000 values"),
        (b"a: &a [*a]", r"job.yaml:1:8: the alias `\*a` refers to itself"),
        (b"a: *b", r"job.yaml:1:4: the alias `\*b` has no anchor above it"),
        (
            b"a: !!python/object:os.system x",
            "job.yaml:1:4: the tag `!!python/object:os.system` is not allowed",
        ),
        (b"a: !!python/object/apply:os.system [ls]", "the tag `!!python/object/apply:os.system`"),
        (b"a: !own {}", "the tag `!own` is not allowed"),
        (b"a: !!int x", "`x` is not a valid `!!int`"),
        (b"a: 1\n---\nb: 2\n", "job.yaml:2:1: a second document"),
        (b"a: .nan", "job.yaml:1:4: `.nan` is not a number"),
        (b"a: -.inf", "`-.inf` is not a number"),
        (b"a: 1e999", "too large"),
        (b"a: " + b"9" * 5000, "too large"),
        (b"a: 1\nb: \xff", r"job.yaml:2:4: not UTF-8: a stray byte 0xff"),
        (b"a: 1\nb: x\x00", r"job.yaml:2:5: the control character U\+0000"),
        (b"a: \x1b[31m", r"control character U\+001B"),
        (b'a: "\\ud800"', "invalid YAML"),
        (b"1: 2", "a key must be text, not the number 1\n.*quotes"),
        (b"? [a]\n: 2", "a key must be text, not a list"),
        (b"[" * 10_000_000, "larger than 1,000,000 bytes"),
        (b"[" * 900_000, "job.yaml:1:(51|1001): nested more than 50 levels deep"),
        (b"{a: " * 200_000, "nested more than 50"),
        (b"- " * 400_000, "nested more than 50"),
        (b"? " * 400_000, "nested more than 50"),
        (b"%YAML 3.0\n---\na: 1\n", "invalid YAML"),
    ],
)
def test_what_is_refused_and_where(content: bytes, message: str) -> None:
    assert re.search(message, refusal(content)), refusal(content)[:500]


def test_aliases_that_nest_too_deep(wording: Wording) -> None:
    chain = "a: &a0 [1]\n" + "".join(f"b{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 90))
    wording(refusal(chain.encode()))


def test_several_mistakes_come_at_once() -> None:
    found = refusal(b"a: 1\na: 2\nb: .nan\nc: !x 1\n")
    assert [line.split()[0] for line in found.splitlines() if line.startswith("job")] == [
        "job.yaml:2:1:",
        "job.yaml:3:4:",
        "job.yaml:4:4:",
    ]


def test_a_byte_order_mark_is_no_mistake() -> None:
    assert data_of("\ufeffa: 1") == {"a": 1}


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "quickstart.yaml").write_text("a: 1")
    with wording.raises(SpecError):
        read_source(tmp_path / "quikstart.yaml")


def test_a_directory_is_no_file(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "job.yaml").write_text("a: 1")
    with wording.raises(SpecError):
        read_source(tmp_path)


@pytest.mark.parametrize("name", ["x\0y", "x" * 300])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="can't be read"):
        read_source(tmp_path / name)


def test_a_file_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    def refuse(self: Path, mode: str) -> None:  # root, as in a container, may read everything
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with wording.raises(SpecError):
        read_source(tmp_path / "job.yaml")


def overridden(text: str, *overrides: str) -> Source:
    return override_source(parse_source(text.encode(), "job.yaml"), overrides)


def test_overrides_replace_add_and_reach_into_lists() -> None:
    source = overridden("a: 1\nl: [x, {y: 1}]\n", "a=[1, 3:1]", "new.deep=1e-3", "l.1.y=no", "t=a=b")
    assert source.root.plain() == {
        "a": [1, "3:1"],
        "l": ["x", {"y": "no"}],
        "new": {"deep": 1e-3},
        "t": "a=b",
    }


def test_a_mistake_in_an_override_names_the_option(wording: Wording) -> None:
    source = overridden("a: {b: 1}\n", "a.b=.nan")
    wording(str(source.problems[0]))
    assert str(source.problem(("a", "b"), "wrong")) == "--set a.b: wrong"


@pytest.mark.parametrize("override", ["nothing", "=1", "a..b=1", "a=[", "a.b=1", "l.7=1", "l.x=1", "a=\x00"])
def test_overrides_that_are_refused(override: str, wording: Wording) -> None:
    (problem,) = overridden("a: 1\nl: [x]\n", override).problems
    wording(str(problem))


def test_a_refused_override_stops_no_other() -> None:
    source = overridden("a: 1\n", "b=[", "c", "d=2")
    assert [problem.file for problem in source.problems] == ["--set b", "--set c"]
    assert source.root.plain() == {"a": 1, "b": Unreadable(), "d": 2}


# Schema, reference and template say what the program does


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


def test_the_schema_of_improvements_describes_their_json() -> None:
    schema = improvement_schema()
    assert schema["properties"] == {"improve": {"$ref": "#/$defs/Improvement"}}
    part = schema["$defs"]["Improvement"]["properties"]
    assert {*part} == {each.name for each in fields(Improvement)}
    assert len(part["diff"]["description"]) > 10
    assert "kept" in schema["$defs"]["RemedyResult"]["properties"]["verdict"]["enum"]
