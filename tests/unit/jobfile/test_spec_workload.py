"""`workload` and `params` against the source of the function, without running it."""

import inspect
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.kinds import builtin_file
from gpurun.launcher.jobfile.load import check_source, load_job
from gpurun.launcher.jobfile.params import (
    MAX_BYTES,
    Signature,
    catalogue,
    read_module,
    render_catalogue,
    render_entry,
    signature_of,
    signature_of_function,
)
from gpurun.launcher.jobfile.yaml.tree import parse_source
from gpurun.launcher.run.open import Invocation, load_invocation
from gpurun.workloads.registry import BUILTINS
from tests.known import known
from tests.wording import Wording

PLAIN = """\
def build(width: int, depth=2, *, rate: float = 1e-3, name: str | None = None, fast: bool = False): ...
"""


INNER = (
    "class Other:\n    def build(self): ...\n    def __getattr__(self, name): ...\n"
    "def run():\n    build = 1\n    model.eval()\n    model.modules()\n"
    "def buildd(): ...\n"
)
"""Methods and locals, which are no functions of the module."""


def mistakes(directory: Path, source: str | bytes, text: str, workload: str = "train.py:build") -> str:
    """What is said of a job with this workload; the empty text if nothing."""
    (directory / "train.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    path = directory / "job.yaml"
    path.write_text(f"workload: {workload}\nglobal_batch: 64\n{text}")
    try:
        load_job(path)
    except SpecError as error:
        return str(error).replace(f"{directory}/", "")
    return ""


@pytest.mark.parametrize(
    "source",
    [
        "@wrapper\ndef build(width: int): ...\n",
        "def build(width: int, /): ...\n",
        "build = make_build()\n",
        "from elsewhere import build\n",
        "from elsewhere import *\n",
        "import elsewhere as build\n",
        "class build(Base): ...\n",
        "class build(Base):\n    def __init__(self, width): ...\n",
        "class build(metaclass=Meta):\n    def __init__(self, width): ...\n",
        "class build:\n    def __new__(cls, *args, **kwargs): ...\n    def __init__(self, width): ...\n",
        "class build:\n    @wrapper\n    def __init__(self, width): ...\n",
        "class build:\n    if fast:\n        def __init__(self, width): ...\n",
        "@dataclass\nclass build:\n    width: int\n",
        "class build: ...\nbuild.__init__ = other\n",
        "if fast:\n    def build(width: int): ...\nelse:\n    def build(w): ...\n",
        "def build(width: int): ...\nbuild = wrapped(build)\n",
        "def build(width: int): ...\ntry:\n    from fast import build\nexcept ImportError:\n    pass\n",
        "globals()['build'] = print\n",
        "def setup():\n    global build\n    build = print\nsetup()\n",
        "import sys\nsetattr(sys.modules[__name__], 'build', print)\n",
        "def __getattr__(name): ...\n",
        "def def\n",
        b"\xff\xfe\0",
        "\0",
        "x = " + "(" * 5000,
        "x = 1\n" * MAX_BYTES,
    ],
)
def test_what_only_running_the_code_can_show_is_left_to_the_worker(
    tmp_path: Path, source: str | bytes
) -> None:
    assert mistakes(tmp_path, source, "params: {anything: x}\n") == ""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("int = Special\ndef build(width: int): ...\n", "params: {width: x}\n"),
        ("def build(width: int | Special): ...\n", "params: {width: x}\n"),
        ("def build(width: 'int'): ...\n", "params: {width: x}\n"),
        ("def build(width: int = None): ...\n", "params: {width: null}\n"),
        ("def build(width: int, **rest): ...\n", "params: {width: 3, other: x}\n"),
        ("def build(*args, width: int): ...\n", "params: {width: 3}\n"),
        ("class build:\n    def __init__(self, width: int): ...\n", "params: {width: 3}\n"),
        (INNER + PLAIN, "params: {width: 1}\n"),
        ('from words import Literal\ndef build(size: Literal["tiny"]): ...\n', "params: {size: big}\n"),
        (
            'from typing import Literal\nLiteral = dict\ndef build(size: Literal["tiny"]): ...\n',
            "params: {size: big}\n",
        ),
    ],
)
def test_what_is_allowed(tmp_path: Path, source: str, text: str) -> None:
    assert mistakes(tmp_path, source, text) == ""


STREAM = "class Stream(IterableDataset[int]):\n    def __iter__(self): ...\n"


@pytest.mark.parametrize(
    ("source", "is_mistake"),
    [
        (f"{STREAM}def build():\n    return Workload(model, dataset=Stream(3))\n", True),
        (f"{STREAM}def build():\n  def loss(o): return o\n  return g.Workload(dataset=Stream())\n", True),
        (f"{STREAM}def build():\n    return Workload(model, dataset=first(Stream()))\n", False),
        (f"{STREAM}def build():\n    return first(dataset=Stream())\n", False),
        (f"{STREAM}def build(a=1):\n    if a: return x\n    return Workload(dataset=Stream())\n", False),
        (f"{STREAM}@listed\ndef build():\n    return Workload(dataset=Stream())\n", False),
        (f"{STREAM}Stream = listed(Stream)\ndef build():\n    return Workload(dataset=Stream())\n", False),
        (f"{STREAM}    def __getitem__(s, k): ...\ndef build(): return Workload(dataset=Stream())\n", False),
    ],
)  # fmt: skip
def test_an_iterable_dataset_is_found_where_the_source_shows_it(
    tmp_path: Path, source: str, is_mistake: bool, wording: Wording
) -> None:
    found = mistakes(tmp_path, source, "")
    assert bool(found) == is_mistake
    if found:
        wording(found)


def test_code_does_not_run_and_does_not_warn(tmp_path: Path) -> None:
    source = f"open({str(tmp_path / 'ran')!r}, 'w')\npattern = '\\d'\n{PLAIN}"
    assert "has no parameter" in mistakes(tmp_path, source, "params: {width: 1, x: 1}\n")
    assert not (tmp_path / "ran").exists()


INIT = "class build:\n    def __init__(self, width: int): ...\n"
WRONG = {
    "an unknown parameter of a class": ("class build: ...\n", "params: {x: 1}\n", "train.py:build"),
    "one that a class needs": (INIT, "", "train.py:build"),
    "one that a derived class needs": (
        "class build(nn.Module):\n    def __init__(self, a, *, b=1): ...\n", "", "train.py:build"
    ),
    "a value": ("build = 3\n", "", "train.py:build"),
    "parameters of an open function": (
        "def build(width: int, depth: int, **rest): ...\n", "params: {width: x}\n", "train.py:build"
    ),
    "only methods and locals": (INNER, "", "train.py:build"),
    "a function of a module": (PLAIN, "params: {depht: 1}\n", "train:build"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_function_and_its_params(name: str, tmp_path: Path, wording: Wording) -> None:
    wording(mistakes(tmp_path, *WRONG[name]))


@pytest.mark.parametrize("workload", ["inner.deep:build", "json.nothing:build", "lib.moved.deep:build"])
def test_a_module_whose_file_is_in_doubt_is_left_to_the_worker(tmp_path: Path, workload: str) -> None:
    (tmp_path / "inner").mkdir()
    for package, init in (("lib", ""), ("lib/moved", "__path__.insert(0, 'elsewhere')\n")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(init)
    (tmp_path / "lib" / "moved" / "deep.py").touch()
    assert mistakes(tmp_path, "raise SystemExit\n", "params: {x: 1}\n", workload) == ""


def test_a_module_of_that_name_in_two_places_is_left_to_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "here")
    assert mistakes(tmp_path, "raise SystemExit\n", "", "train:build") == ""


@pytest.mark.parametrize("workload", ["train:nosuch", "lib.deep:nosuch", "lib:nosuch"])
def test_a_modules_function_is_looked_for_in_its_source(tmp_path: Path, workload: str) -> None:
    """Nothing is imported for it."""
    (tmp_path / "lib").mkdir()
    for file in ("__init__.py", "deep.py"):
        (tmp_path / "lib" / file).write_text("raise SystemExit\n")
    found = mistakes(tmp_path, f"raise SystemExit\n{PLAIN}", "", workload)
    assert f"{workload.partition(':')[0]} has no function `nosuch`" in found
    assert not {"train", "lib"} & sys.modules.keys()


@pytest.mark.parametrize("name", sorted(BUILTINS))
def test_the_source_of_a_builtin_shows_what_the_function_takes(name: str) -> None:
    module = known(read_module(builtin_file(name)))
    signature = known(signature_of(module, BUILTINS[name].function))
    real = inspect.signature(BUILTINS[name].load()).parameters
    assert [param.name for param in signature.params] == list(real)
    assert [param.is_required for param in signature.params] == [p.default is p.empty for p in real.values()]


@pytest.mark.parametrize(
    "params",
    [
        "a, b=2, *, c: float = 1e-3, **rest",
        "a: int, b: str | None = None, c: bool = None, d: list[int] = (), e: int | Own = 1",
        'a: Literal["x", "y"], b: Literal["x"] | None, c: Literal["x"] | str, d: Literal["x", 3]',
        'a: Literal["x"] | Literal["y"], *args, b: None = None, c: int | float | bool = 1',
    ],
)
def test_source_and_function_have_one_signature(params: str, tmp_path: Path) -> None:
    source = f"from typing import Literal\nclass Own: ...\ndef build({params}): ...\n"
    (tmp_path / "train.py").write_text(source)
    module, names = read_module(tmp_path / "train.py"), dict[str, Any]()
    exec(source, names)
    assert module is not None
    read = known(signature_of(module, "build"))
    found = signature_of_function(names["build"])
    assert found.is_open == read.is_open
    assert [replace(param, default=None) for param in found.params] == [
        replace(param, default=None) for param in read.params
    ]


def test_what_a_function_takes_is_known_wherever_python_knows_it() -> None:
    def build(first: Any = 1, /, width: "int" = 1, depth: "Literal['x']" = "x", *rest: Any) -> None: ...

    def of_a_missing_type(width: "Nowhere", depth: object()) -> None: ...  # type: ignore # noqa: F821

    @wraps(build)
    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    width, depth = signature_of_function(build).params
    assert (width.types, width.is_required) == ({"int"}, False)
    assert (depth.types, depth.choices) == ({"str"}, ("x",))
    assert signature_of_function(of_a_missing_type).required == {"width", "depth"}
    assert [(p.name, p.types) for p in signature_of_function(wrapper).params] == [
        ("width", frozenset()), ("depth", frozenset())
    ]  # fmt: skip
    assert signature_of_function(partial(of_a_missing_type, width=2)).required == {"depth"}
    assert signature_of_function(dict) == Signature((), is_open=True)


@pytest.mark.parametrize(
    ("annotation", "value", "found"),
    [
        ('Literal["tiny", "small"]', "small", ""),
        ('Literal["tiny", "small"]', "tinny", 'expected `tiny` or `small`, got the text "tinny"'),
        ('Literal["tiny"]', "3", "expected `tiny`, got the number 3"),
        ('Literal["tiny"] | Literal["small"]', "big", 'expected `tiny` or `small`, got the text "big"'),
        ('Literal["tiny"] | None', "null", ""),
        ('Literal["tiny"] | None', "big", 'expected `tiny`, got the text "big"'),
        ('Literal["tiny"] | str', "big", ""),
        ('Literal["tiny", 3]', "big", ""),
        ('Union[Literal["tiny"], str]', "big", ""),
    ],
)
def test_texts_of_a_literal(tmp_path: Path, annotation: str, value: str, found: str) -> None:
    source = f"from typing import Literal, Union\ndef build(size: {annotation}): ...\n"
    said = mistakes(tmp_path, source, f"params: {{size: {value}}}\n")
    assert said.partition("\n")[0] == (f"job.yaml:3:16: `params.size`: {found}" if found else "")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("params: {images: there}", ""),
        ("params: {images: ~/there}", ""),
        ("params: {images: ''}", ""),
        (
            "params: {images: nope}",
            "2:18: the image directory nope does not exist; relative paths are resolved from the job file's "
            "directory",
        ),
        ("params: {images: /nope}", "2:18: the image directory /nope does not exist"),
        ("params: {images: ~/nope}", "2:18: the image directory HOME/nope does not exist"),
        ("compare: {params: [{}, {images: /nope}]}", "2:33: the image directory /nope does not exist"),
        ("nodes: 2\nparams: {images: /nope}", ""),
    ],
)
def test_files_that_params_name_are_looked_for(
    tmp_path: Path, text: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    source = parse_source(f"workload: resnet50\n{text}\n".encode(), "job.yaml")
    with pytest.raises(SpecError) if found else nullcontext() as refused:
        check_source(source, tmp_path, runs_here=True)
    assert not found or str(known(refused).value) == f"job.yaml:{found}".replace("HOME", str(tmp_path))


def test_the_users_own_params_are_no_files_of_ours(tmp_path: Path) -> None:
    text = b"workload: train.py:build\nglobal_batch: 8\nparams: {text: hello}\n"
    (tmp_path / "train.py").write_text("def build(text: str): ...\n")
    check_source(parse_source(text, "job.yaml"), tmp_path, runs_here=True)


def test_a_missing_file_is_reported_with_all_other_mistakes(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("workload: gpt\nsed: 1\nparams: {text: nope, layers: -1, heads: 3}\n")
    with pytest.raises(SpecError) as refused:
        load_job(job, runs_here=True)
    said = str(known(refused).value)
    assert all(part in said for part in ("`sed`", "nope", "`layers` of gpt must", "not divisible by 3"))


def test_a_check_and_a_run_look_for_these_files_and_what_is_run_elsewhere_does_not(
    tmp_path: Path, wording: Wording
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("workload: gpt\nglobal_batch: 2\nparams: {text: nope}\n")
    with wording.raises(SpecError):
        load_invocation(Invocation(job, ()))
    refused = CliRunner().invoke(cli, ["check", str(job)])
    assert isinstance(refused.exception, SpecError)
    wording(str(refused.exception))
    submitted = CliRunner().invoke(cli, ["submit", str(job), "--slurm", "--dry-run"])
    assert submitted.exit_code == 0
    (tmp_path / "nope").write_text("there")
    assert load_invocation(Invocation(job, ())).params == {"text": "nope"}


# The list of built-in workloads: complete, explained, and made without torch


ROOT = Path(__file__).resolve().parents[3]


def test_the_catalogue_has_every_workload_and_every_parameter() -> None:
    entries = {entry.name: entry for entry in catalogue()}
    assert entries.keys() == BUILTINS.keys()
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
    assert [workload["name"] for workload in listed["workloads"]] == ["gpt", "lstm"]


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
    assert [entry["name"] for entry in listed["workloads"]] == list(BUILTINS)


def test_defaults_are_in_the_signature() -> None:
    module = known(read_module(ROOT / "workloads" / "gpt.py"))
    signature = known(signature_of(module, "build"))
    assert {param.name: param.default for param in signature.params}["learning_rate"] == "0.0003"
