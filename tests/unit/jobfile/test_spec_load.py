"""Job files: what a right one becomes, and what is said of a wrong one."""

import json
import re
from pathlib import Path

import pytest

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.jobfile.model import JobSpec

SMALL = "workload: gpt\nglobal_batch: 64\n"


def job(folder: Path, text: str, *overrides: str) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(text)
    return load_job(path, overrides)


def mistakes(folder: Path, text: str, *overrides: str) -> str:
    """All that is said of the file, without the folder's name."""
    with pytest.raises(SpecError) as caught:
        job(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "")


def test_defaults(tmp_path: Path) -> None:
    spec = job(tmp_path, SMALL)
    assert (spec.name, spec.devices, spec.strategy, spec.split) == ("job", "auto", "ddp", "even")
    assert (spec.precision, spec.accumulate, spec.seed, spec.device_count) == ("fp32", 1, 0, None)
    assert (spec.steps.warmup, spec.steps.rounds, spec.steps.early_stop, spec.steps.launches) == (
        10,
        28,
        True,
        None,
    )
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
steps: {warmup: 5, rounds: 14, early_stop: false, launches: 8}
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "global_batch: '64'",
            '`global_batch`: expected a whole number, got the text "64"\n    write it without quotes',
        ),
        ("global_batch: true", "`global_batch`: expected a whole number, got `true`"),
        ("global_batch: 64.0", "`global_batch`: expected a whole number, got the number 64.0"),
        ("global_batch: -1", "`global_batch`: expected a whole number of at least 1, got the number -1"),
        ("global_batch: 0", "at least 1"),
        ("global_batch: 9999999999", "at most 2147483647"),
        ("global_batch:", "`global_batch`: expected a whole number, got nothing"),
        ("compare: {global_batch: [8, max]}", "`max` can't be compared with other batches"),
        ("global_batch: .nan", "`.nan` is not a number that a job can use"),
        ("seed: -1", "at least 0"),
        ("seed: .inf", "`.inf` is not a number"),
        ("timeout: .nan", "`.nan` is not a number"),
        ("timeout: 0", "above 0"),
        ("timeout: -5", "above 0"),
        ("timeout: 10 minutes", 'expected a duration, got the text "10 minutes"\n    use 90s, 10m'),
        ("timeout: true", "expected a duration, got `true`"),
        ("precision: fp23", 'expected `fp64`, `fp32`, `tf32`, `bf16` or `fp16`, got the text "fp23"'),
        ("strategy: dpp", "did you mean `dp`?"),
        ("accumulate: 0", "at least 1"),
        ("gradient_check: yes", 'expected true or false, got the text "yes"'),
        ("name: a/b", "expected a name that can be a directory"),
        ("name: ..", "expected a name that can be a directory"),
        ("name: 5", "expected a name, got the number 5"),
        ("params: [1]", "`params`: expected a mapping (`key: value`), got a list"),
        ("params:", "leave the key out"),
        ("devices: gpu", 'expected devices, got the text "gpu"'),
        ("devices: cpu", "`cpu:2` makes two devices"),
        ("devices: cuda:1", "write `[cuda:1]` for that GPU"),
        ("devices: {cpu: 2}", "write it without the space"),
        ("devices: cpu:0", "expected 1 to 256 CPU devices, got 0"),
        ("devices: cpu:99999", "expected 1 to 256 CPU devices, got 99999"),
        ("devices: []", "expected 1 to 256 devices, got 0"),
        ("devices: [cuda:0, cpu:0]", "CPU and CUDA devices can't share a batch"),
        ("devices: [cuda]", "expected the name of a device"),
        ("split: balance", "expected a split"),
        ("min_local_batch: 2", "min_local_batch"),
        ("split: 48", "expected a split, got the number 48"),
        ("split: 48/16", "write samples per device as a list: [48, 16]"),
        ("split: '1.5:1'", "write a ratio of whole numbers"),
        ("split: [48, x]", 'expected a number of samples (at least 1), got the text "x"'),
        ("split: [64, 0]", "(at least 1), got the number 0"),
        ("split: [true, 63]", "got `true`"),
        ("split: '0:0'", "`split`: the ratio 0:0 gives a device no samples"),
        ("compare: {split: [even, '0:1']}", "`compare.split`: the ratio 0:1 gives a device no samples"),
        (
            "split: [48, 15]",
            "the split [48, 15] adds up to 63, not to the global batch of 64\n    did you mean [48, 16]?",
        ),
        (
            "compare: {split: [48, 16]}",
            "a number alone is not a split\n    for one split into 2, write [[48, 16]]",
        ),
        ("compare: {split: [even, 48]}", "expected a split, got the number 48"),
        (
            "compare: {strategy: ddp}",
            'expected a list, got the text "ddp"\n    put what varies in brackets: [ddp]',
        ),
        ("compare: {strategy: []}", "expected at least one value, got an empty list"),
        (f"compare: {{seed: {['x'] * 101}}}", "`compare.seed`: expected at most 100 values, got 101"),
        ("compare: {seed: [1, .nan]}", "`.nan` is not a number"),
        ("compare: {params: {a: 1}}", "`compare.params`: expected a list, got a mapping"),
        ("compare: {name: [a]}", "unknown key `name` under `compare`"),
        ("compare:", "expected a mapping (`key: value`), got nothing"),
        (
            "baseline: {strategy: dp}",
            "no variant has `strategy: dp`, so it can't be the baseline\n    the variants have ddp",
        ),
        ("baseline: {split: [1, 63]}", "no variant has `split: [1, 63]`"),
        ("baseline: 3", "`baseline`: expected a mapping"),
        ("steps: {rounds: 0}", "at least 1"),
        ("steps: {round: 1}", "unknown key `round` under `steps`\n    did you mean `rounds`?"),
        ("profile: {steps: -1}", "at least 0"),
        ("rounds: 3", "unknown key `rounds`\n    `rounds` belongs under `steps`"),
        ("precison: fp32", "unknown key `precison`\n    did you mean `precision`?"),
        ("zzz: 1", "unknown key `zzz`\n    valid keys: workload, script"),
        ("args: [--epochs]", "`args` applies to programs only (`script`, `module`)"),
        ("env: {A: b}", "`env` applies to programs only (`script`, `module`)"),
        ("nodes: 0", "at least 1"),
        ("workload: gtp", "there is no built-in workload `gtp`\n    did you mean `gpt`?"),
        ("workload: train.py", "name the function that builds it, such as train.py:build"),
        (
            "workload: train.py:build",
            "there is no file train.py\n    the path is relative to the job file's directory",
        ),
        ("workload: a b", "expected the name of a workload"),
        ("workload: [gpt]", "expected the name of a workload, got a list"),
        ("steps: !!python/object:os.system {}", "the tag `!!python/object:os.system` is not allowed"),
    ],
)
def test_one_mistake(tmp_path: Path, line: str, message: str) -> None:
    key = line.partition(":")[0]
    rest = {"workload": "workload: gpt", "global_batch": "global_batch: 64"}
    rest.pop(key, None)
    text = "\n".join([*rest.values(), line]) + "\n"
    found = mistakes(tmp_path, text)
    assert message in found
    assert re.match(rf"job\.yaml:{len(rest) + 1}:\d+: ", found), found
    assert found.count("job.yaml:") == 1, found


def test_the_place_is_that_of_the_value_or_key(tmp_path: Path) -> None:
    text = f"{SMALL}compare:\n  split: [even, [48, 16], [40, x]]\n  seed: [1, -2]\nsteps: {{roundz: 3}}\n"
    found = mistakes(tmp_path, text)
    places = [line.split()[0] for line in found.splitlines() if line.startswith("job.yaml")]
    assert places == ["job.yaml:4:32:", "job.yaml:5:13:", "job.yaml:6:9:"]


def test_all_mistakes_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "name: a b\nname: c\nglobal_batch: -1\nfoo: !x 1\ntimeout: .inf\nsplit: {}\n"
    found = mistakes(tmp_path, text)
    lines = [int(line.split(":")[1]) for line in found.splitlines() if line.startswith("job.yaml")]
    assert lines == [1, 1, 2, 3, 4, 4, 5, 6]  # line 1 also lacks `workload`
    assert "missing key `workload`" in found


def test_missing_keys_are_reported_at_the_top(tmp_path: Path) -> None:
    found = mistakes(tmp_path, "\n\nname: x\n")
    assert found.startswith("job.yaml:3:1: missing key `workload`\n    add `workload: gpt`")
    assert "job.yaml:3:1: missing key `global_batch`" in found


@pytest.mark.parametrize(
    ("text", "what"), [("[1, 2]", "a list"), ("hello", 'the text "hello"'), ("7", "the number 7")]
)
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, what: str) -> None:
    assert f"expected keys and values (`workload: gpt`), got {what}" in mistakes(tmp_path, text)


def test_a_flood_of_mistakes_is_cut(tmp_path: Path) -> None:
    found = mistakes(tmp_path, SMALL + "".join(f"key{n}: 1\n" for n in range(1000)))
    assert found.count("unknown key") == 30
    assert found.endswith("and 970 more mistakes")


def test_overrides_follow_the_same_rules(tmp_path: Path) -> None:
    spec = job(
        tmp_path, SMALL, "global_batch=9", "compare.split=[even, 3:1]", "steps.rounds=7", "params.width=8"
    )
    assert (spec.global_batch, spec.compare.split, spec.steps.rounds) == (9, ("even", "3:1"), 7)
    assert spec.params == {"width": 8}


def test_a_file_that_is_no_yaml_does_not_hide_the_mistakes_of_overrides(tmp_path: Path) -> None:
    found = mistakes(tmp_path, "workload: [gpt\n", "steps.rounds", "seed=[")
    assert [part in found for part in ("job.yaml:", "--set steps.rounds", "--set seed")] == [True] * 3


def test_an_override_that_would_have_no_effect_is_a_mistake(tmp_path: Path) -> None:
    text = SMALL + "compare: {split: [even, '3:1']}\n"
    assert "--set split: this value has no effect: `compare.split`" in mistakes(
        tmp_path, text, "split=[10, 54]"
    )
    assert job(tmp_path, text, "compare.split=[[10, 54]]", "seed=3").compare.split == ((10, 54),)


def test_mistakes_of_overrides_name_the_option_and_come_last(tmp_path: Path) -> None:
    found = mistakes(tmp_path, SMALL + "foo: 1\n", "steps.rounds=x", "steps.roundz=1")
    assert [line.split(":")[0] for line in found.splitlines() if not line.startswith(" ")] == [
        "job.yaml",
        "--set steps.rounds",
        "--set steps.roundz",
    ]


def test_a_split_may_fit_one_of_several_batches(tmp_path: Path) -> None:
    spec = job(tmp_path, f"{SMALL}compare: {{global_batch: [64, 32], split: [even, [24, 8]]}}\n")
    assert spec.compare.split == ("even", (24, 8))


def test_a_file_beside_the_job_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def build(): ...\n")
    assert job(tmp_path, "workload: train.py:build\nglobal_batch: 4\n").workload == "train.py:build"


def places(found: str) -> list[str]:
    """Line and column, or the option, of every mistake."""
    heads = [line.partition(": ")[0] for line in found.splitlines() if not line.startswith(" ")]
    return [head.removeprefix("job.yaml:") for head in heads]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("precison: fp32\nsplit: [48, 17]\n", ["3:1", "4:8"]),
        ("compare: {split: [[48, 17], even], accumulate: [1, 0]}\n", ["3:19", "3:52"]),
        ("compare: {split: [even, [x, 1], [48, 17]]}\nbaseline: {strategy: dp}\n", ["3:26", "3:33", "4:22"]),
        ("devices: cpu:2\ndevice_count: 3\nprecision: tf32\nsplit: [4, 60, 1]\n", ["4:15", "5:12", "6:8"]),
        ("devices: cpu:2\nseed: -1\nsplit: [10, 20, 34]\n", ["4:7", "5:8"]),
        ("steps: {round: 1}\nparams: {layer: 2}\n", ["3:9", "4:10"]),
        ("profile: {ranks: [-1]}\nsplit: [48, 17]\n", ["3:19", "4:8"]),
    ],
)
def test_mistakes_between_keys_come_with_those_of_other_keys(
    tmp_path: Path, text: str, where: list[str]
) -> None:
    assert places(mistakes(tmp_path, SMALL + text)) == where


def test_a_missing_key_hides_no_other_mistake(tmp_path: Path) -> None:
    found = mistakes(tmp_path, "workload: gtp\nglobal_bacth: 64\nsplit: [48, 17]\n")
    assert "there is no built-in workload `gtp`" in found
    assert "unknown key `global_bacth`" in found
    assert "adds up" not in found  # to what, is not known


@pytest.mark.parametrize("text", ["split: [52, 12]", "compare: {split: [even, [52, 12]]}"])
def test_samples_by_number_need_a_batch_by_number(tmp_path: Path, text: str) -> None:
    found = mistakes(tmp_path, f"workload: sleep\ndevices: cpu:2\nglobal_batch: max\n{text}\n")
    assert "the split [52, 12] lists samples, but `global_batch: max` isn't known in advance" in found
    assert 'state `global_batch: 64`, or give a ratio: `split: "13:3"`' in found


@pytest.mark.parametrize(
    "text",
    [
        "precison: bf16\nbaseline: {precision: bf16}\n",
        "compare: {strategi: [ddp, dp]}\nbaseline: {strategy: dp}\n",
        "comprae: {strategy: [ddp, dp]}\nbaseline: {strategy: dp}\n",
        "compare: 3\nbaseline: {strategy: dp}\n",
        "compare: {strategy: [ddp, db]}\nbaseline: {strategy: dp}\n",
        "compare: {split: 7}\nsplit: [48, 17]\n",
        "split: [48, 17]\ncompare: {global_batch: [65, x]}\n",
        "devices: cpu\nsplit: [10, 20, 34]\n",
        "devices: cpu:3\ncompare: {device_count: [x]}\nsplit: [32, 32]\n",
        "params: 3\nbaseline: {params: {layers: 3}}\n",
    ],
)
def test_a_mistake_has_no_consequences(tmp_path: Path, text: str) -> None:
    assert len(places(mistakes(tmp_path, SMALL + text))) == 1


def test_a_syntax_error_in_one_option_hides_no_other(tmp_path: Path) -> None:
    found = mistakes(tmp_path, "workload: gpt\n", "global_batch=[", "foo=1", "glob=3", "split")
    assert places(found) == ["--set global_batch", "--set split", "--set foo", "--set glob"]


def test_the_baseline_may_be_called_by_another_name(tmp_path: Path) -> None:
    spec = job(tmp_path, f"{SMALL}split: [32, 32]\nbaseline: {{split: even}}\n")
    assert spec.baseline is not None
    assert spec.baseline.split == "even"
