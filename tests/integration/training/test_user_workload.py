"""A user's own model is found and run; each mistake in it is reported with file, line, expected and got."""

import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets an environment variable
from PIL import Image

from gpurun.launcher.errors import ParamsError, VariantError
from gpurun.launcher.machine.accelerators import ACCELERATORS, CPU
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.records import VariantConfig
from gpurun.launcher.worker.base.failure import UserError
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.gradient_check import check_gradients
from gpurun.launcher.worker.training.load_workload import load_workload
from gpurun.launcher.worker.training.trainer import Trainer
from gpurun.workloads.base import Workload
from tests.known import known
from tests.launches import launch_config

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
GOOD = """\
import torch
from torch import nn
from gpurun import Workload
class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x)
def batch(size, generator):
    x = torch.randn(size, 4, generator=generator)
    return x, x[:, :2]
def loss(outputs, targets):
    return (outputs - targets).square().mean()
def build(width: int = 2):
    return Workload(Model(4, width), batch, loss)
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def config(strategy: str = "single", device: str = "cpu", split: tuple[int, ...] = (8,)) -> LaunchConfig:
    devices = (device,) * len(split)
    return launch_config(VariantConfig("v", split, 1), strategy=strategy, devices=devices)


def built(name: str, params: dict[str, Any], directory: Path) -> Workload:
    """What `name` builds, where that is no micro-benchmark."""
    return cast(Workload, load_workload(name, params, directory))


def start(
    source: str, directory: Path, name: str = "train.py:build", device: str = "cpu", **params: Any
) -> None:
    """Everything that a worker does before it measures, and one step."""
    (directory / "train.py").write_text(source)
    launch = config(device=device)
    trainer = Trainer(built(name, params, directory), launch, 0)
    trainer.step(trainer.prepare(launch.variants[0], 0), NoClock())


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("own_model.py:build", {"width": 8}),
        ("own_data.py:ratings", {"width": 8}),
        ("own_data.py:stream", {"samples": 24}),
    ],
)
def test_the_examples_train(name: str, params: dict[str, int]) -> None:
    launch = config("dp", split=(5, 3))
    trainer = Trainer(built(name, params, EXAMPLES), launch, 0)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.step(trainer.prepare(launch.variants[0], 0), NoClock())
    assert not any(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_the_model_in_the_readme_trains(tmp_path: Path) -> None:
    """With a parameter of the job's."""
    text = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    start(source, tmp_path, width=8)
    launch = config("dp", split=(5, 3))
    trainer = Trainer(built("train.py:build", {"width": 8}, tmp_path), launch, 0)
    assert [p.shape[0] for p in trainer.model.parameters()] == [8, 8, 2, 2]
    assert check_gradients(trainer, launch, 0)["v"]["gradient_error"] < 1e-5


def test_any_object_with_the_attributes_will_do(tmp_path: Path) -> None:
    source = GOOD.replace("return Workload(Model(4, width), batch, loss)", "return Plain()")
    start(source + "class Plain:\n    model = Model(4, 2)\n    batch = staticmethod(batch)\n"
          "    loss = staticmethod(loss)\n", tmp_path)  # fmt: skip


def test_a_users_files_hide_no_installed_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(GOOD)
    (tmp_path / "helper.py").write_text("width = 2\n")
    load_workload("json.py:build", {}, tmp_path)
    assert sys.modules["json"].__file__ != str(tmp_path / "json.py")
    assert sys.path[-1] == str(tmp_path)
    start("import helper\n" + GOOD, tmp_path)


def test_a_full_module_name_works(tmp_path: Path) -> None:
    package = tmp_path / "their_package"
    package.mkdir()
    (package / "models.py").write_text(GOOD)
    assert built("their_package.models:build", {}, tmp_path).reduction == "mean"


MADE = """
import functools

@functools.wraps(build)
def decorated(*args, **kwargs):
    return build(**{name: int(value) for name, value in kwargs.items()})

def maker():
    def made(width: int):
        return build(width)
    return made

made = maker()
"""
"""Functions whose source doesn't show what they take."""

# ruff: noqa: E501 (a table is read by its columns)
# name: (what to replace, by what, line, expected, got)
MISTAKES = {
    "exception in build": ("    return Workload(", "    {}['depth']\n    return Workload(", 13, "a Workload", "KeyError: 'depth'"),
    "exit in build": ("    return Workload(", "    raise SystemExit(2)\n    return Workload(", 13, "a Workload", "SystemExit: 2"),
    "exception on import": ("def batch", "1 / 0\ndef batch", 7, "imports without", "ZeroDivisionError"),
    "syntax": ("def batch(", "def batch((", 7, "imports without", "SyntaxError"),
    "missing import": ("import torch\n", "import torch, not_there\n", 1, "imports without", "not_there"),
    "missing name": ("def build(", "def buid(", 1, "a function build(...)", "did you mean buid?"),
    "build returns nothing": ("    return Workload(", "    Workload(", 12, "torch.nn.Module", "the function returned nothing"),
    "not a module": ("Workload(Model(4, width)", "Workload((4, width)", 12, "torch.nn.Module", "tuple (4, 2)"),
    "no parameters": ("Workload(Model(4, width)", "Workload(nn.ReLU()", 12, "requires a gradient", "ReLU"),
    "on meta": ("Workload(Model(4, width)", "Workload(Model(4, width).to('meta')", 12, "with values on the CPU", "Model"),
    "wrapped for dp": ("Workload(Model(4, width)", "Workload(nn.DataParallel(Model(4, width))", 12, "the job says `strategy: dp` in place of DataParallel", "DataParallel(model)"),
    "a part wrapped": ("Workload(Model(4, width)", "Workload(nn.Sequential(nn.DataParallel(Model(4, width)))", 12, "`strategy: dp`", "DataParallel"),
    "wrapped for ddp": ("Workload(Model(4, width)", "Workload(nn.parallel.DistributedDataParallel(Model(4, width))", 12, "the job says `strategy: ddp` in place of DistributedDataParallel", "DistributedDataParallel(model)"),
    "wrapped for fsdp": ("Workload(Model(4, width)", "Workload(torch.distributed.fsdp.FullyShardedDataParallel(Model(4, width))", 12, "`strategy: fsdp`", "FullyShardedDataParallel"),
    "sharded": ("Workload(Model(4, width)", "Workload(torch.distributed.fsdp.fully_shard(Model(4, width))", 12, "`strategy: fsdp` in place of fully_shard", "fully_shard(model)"),
    "loss not callable": ("batch, loss)", "batch, 'mse')", 12, "loss(outputs, targets)", "str 'mse'"),
    "no batch": ("batch, loss)", "None, loss)", 12, "batch(size, generator)", "NoneType"),
    "reduction": ("batch, loss)", "batch, loss, reduction='max')", 12, "'mean' or 'sum'", "'max'"),
    "workers": ("batch, loss)", "batch, loss, num_workers=-1)", 12, "at least 0", "-1"),
    "batch of wrong size": ("torch.randn(size,", "torch.randn(64,", 7, "2 samples", "64 rows"),
    "batch of unequal parts": ("x[:, :2]", "x[1:, :2]", 7, "2 samples", "targets with 1 row"),
    "batch of other names": ("return x, x[:, :2]", "return {'a': x, 'b': x}, x", 6, "shape (2, 4); `a`, `b` are no parameters of Model.forward", "dict"),
    "shapes don't fit a model of torch's": ("Workload(Model(4, width)", "Workload(nn.Linear(5, width)", 12, "shape (2, 4)", "RuntimeError"),
    "loss forgotten with a model of torch's": ("Workload(Model(4, width), batch, loss)", "Workload(nn.Linear(4, width), batch)", 12, "set `loss`", "tuple"),
    "a loss of torch's": ("batch, loss)", "batch, nn.functional.nll_loss)", 12, "a scalar tensor", "RuntimeError"),
    "loss forgotten": ("batch, loss)", "batch)", 6, "if samples are (inputs, targets), set `loss`", "tuple"),
    "batch is no pair": ("return x, x[:, :2]", "return x", 7, "(inputs, targets)", "a Tensor"),
    "batch without tensors": ("return x, x[:, :2]", "return 'x', x", 7, "2 samples", "inputs of type str"),
    "batch elsewhere": ("return x, x[:, :2]", "return x.to('meta'), x", 7, "tensors on cpu", "inputs on meta"),
    "exception in batch": ("    return x,", "    size.rows\n    return x,", 9, "(inputs, targets)", "AttributeError"),
    "exception in forward": ("        return super", "        x.rows\n        return super", 6, "all tensors on cpu", "rows"),
    "shapes don't fit": ("torch.randn(size, 4,", "torch.randn(size, 5,", 6, "shape (2, 5)", "RuntimeError"),
    "output elsewhere": ("super().forward(x)", "super().forward(x).to('meta')", 4, "tensors on cpu", "meta"),
    "loss no scalar": (".square().mean()", ".square()", 10, "shape (): the mean over samples, or their sum", "shape (2, 2)"),
    "loss no tensor": (".square().mean()", ".square().mean().item()", 10, "shape ()", "a float"),
    "loss elsewhere": (".square().mean()", ".square().mean().to('meta')", 10, "tensors on cpu", "meta"),
    "loss detached": (".square().mean()", ".square().mean().detach()", 10, "requires a gradient", "doesn't require a gradient"),
    "exception in loss": ("    return (outputs", "    outputs.rows\n    return (outputs", 11, "scalar", "AttributeError"),
    "exception in optimizer": ("batch, loss)", "batch, loss, optimizer=lambda p: p.rows)", 13, "Optimizer", "AttributeError"),
    "optimizer that is none": ("batch, loss)", "batch, loss, optimizer=lambda p: 3)", 13, "a torch.optim.Optimizer", "int"),
    "exception in count": ("batch, loss)", "batch, loss, count=lambda t: t.rows)", 13, "valid targets", "AttributeError"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_give_file_line_expected_and_got(mistake: str, tmp_path: Path) -> None:
    old, new, line, expected, got = MISTAKES[mistake]
    source = GOOD.replace(old, new)
    assert source != GOOD
    with pytest.raises(UserError) as caught:
        start(source, tmp_path)
    error, text = caught.value, str(caught.value)
    assert text.startswith(f"{tmp_path}/train.py:{line}: ")
    assert expected in error.expected
    assert got in error.got
    assert "1 rows" not in error.got
    assert f"    expected: {error.expected}\n    got:      {error.got}" in text
    assert "/launcher/" not in text
    assert "/torch/" not in text
    assert isinstance(error, VariantError)
    assert error.exit_code == 4


def test_a_dataset_of_torchs_is_no_line_of_the_users(tmp_path: Path) -> None:
    rows = "torch.utils.data.TensorDataset(torch.zeros(3, 4), torch.zeros(3, 2))"
    with pytest.raises(UserError, match=r"^the dataset is too small\n"):
        start(GOOD.replace("batch, loss)", f"None, loss, dataset={rows})"), tmp_path)


def test_a_batch_larger_than_the_dataset_costs_its_own_variant_only() -> None:
    entered: list[str] = []
    both = (VariantConfig("small", (5, 3), 1), VariantConfig("large", (15, 15), 1))
    launch = replace(config("dp", split=(5, 3)), variants=both, baseline="small")
    trainer = Trainer(built("own_data.py:stream", {"samples": 24}, EXAMPLES), launch, 0)
    with pytest.raises(UserError, match="too small"):
        check_gradients(trainer, launch, 0, entered.append)
    assert entered[-1] == "large"  # a failure belongs to the variant that was entered last


@pytest.mark.parametrize(
    ("name", "params", "got"),
    [
        ("gtp", {}, "gtp"),
        ("trian.py:build", {}, "did you mean train.py?"),
        ("not_there.models:build", {}, "No module named"),
    ],
)
def test_wrong_names(name: str, params: dict[str, Any], got: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        start(GOOD, tmp_path, name, **params)
    assert got in caught.value.got


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        (
            "build",
            {"widht": 3},
            "12: train.py:build has no parameter `widht`\n    did you mean `width`?",
        ),
        (
            "batch",
            {"size": 3},
            "7: train.py:batch needs `generator` under `params`\n    its parameters are size, generator",
        ),
        (
            "decorated",
            {"witdh": 3},
            "has no parameter `witdh`\n    did you mean `width`?",
        ),
        ("decorated", {"width": "2"}, ""),
        ("made", {"width": "3"}, 'a whole number, got the text "3"\n    write it without quotes'),
        ("made", {}, "train.py:made needs `width` under `params`\n    its parameters are width"),
    ],
)
def test_the_worker_checks_params_by_the_rule_of_jobs(
    name: str, params: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ParamsError) if said else nullcontext() as caught:
        start(GOOD + MADE, tmp_path, f"train.py:{name}", **params)
    if said:
        assert str(known(caught).value).startswith(f"{tmp_path}/train.py:")
        assert str(known(caught).value).endswith(said)
        assert known(caught).value.exit_code == 2


def test_model_tensors_left_on_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant that is no buffer stays where it was when the model moves; `meta` replaces a GPU."""
    monkeypatch.setitem(ACCELERATORS, "meta", replace(CPU, name="meta"))
    source = GOOD.replace("return super().forward(x)", "return super().forward(x) + torch.ones(2)")
    with pytest.raises(UserError) as caught:
        start(source, tmp_path, device="meta")
    assert str(caught.value).startswith(f"{tmp_path}/train.py:6: ")
    assert "all tensors on meta" in caught.value.expected


def test_running_out_of_memory_is_no_ones_mistake(tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        start(GOOD.replace("    return Workload(", "    raise MemoryError\n    return Workload("), tmp_path)


@pytest.mark.parametrize(
    ("error", "words"),
    [("MemoryError", ""), ("RuntimeError('CUDA out of memory.')", ": CUDA out of memory.")],
)
def test_a_device_that_is_too_small_for_anything_is_reported(error: str, words: str, tmp_path: Path) -> None:
    source = GOOD.replace("        return super()", f"        raise {error}\n        return super()")
    with pytest.raises(MemoryError, match=f"^not even the model and 2 samples fit{words}$") as caught:
        start(source, tmp_path)
    assert caught.traceback[-1].path == tmp_path / "train.py"


@pytest.mark.parametrize(
    ("old", "new", "warns"),
    [
        ("generator=generator", "generator=generator", False),
        (", generator=generator", "", True),
        ("return x, x[:, :2]", "return x * float('nan'), x[:, :2]", False),
    ],
)
def test_a_batch_that_ignores_its_generator_is_reported(
    old: str, new: str, warns: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(GOOD.replace(old, new))
    warning = Trainer(built("train.py:build", {}, tmp_path), config(), 0).batch_warning
    if warns:
        assert warning is not None
        assert warning.startswith(f"{tmp_path}/train.py:7: batch(size, generator) returns")
    else:
        assert warning is None


def test_listing_the_builtins_imports_no_torch() -> None:
    program = dedent("""
        import sys, workloads, gpurun.workloads.registry as registry
        assert {"gpt", "mlp", "sleep"} < set(registry.BUILTINS)
        assert "torch" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", program], check=True)


SMALL_DATASET = GOOD.replace("batch, loss)", "None, loss, dataset=[(torch.zeros(4), torch.zeros(1))] * size)")


def test_a_dataset_that_is_too_small_names_the_global_batch(tmp_path: Path) -> None:
    source = SMALL_DATASET.replace("def build(", "def build(size, ")
    with pytest.raises(UserError) as error:
        start(source, tmp_path, size=1)
    assert "global batch, 8 samples" in str(error.value)
    assert "got:      1 sample\n" in f"{error.value}\n"


@pytest.mark.slow
def test_a_directory_with_fewer_images_than_a_batch_is_a_mistake_in_the_job(tmp_path: Path) -> None:
    for number in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    workload = built("resnet50", {"images": str(tmp_path), "num_workers": 0}, tmp_path)
    with pytest.raises(
        ParamsError, match=r"^a global batch needs 8 images, but only 3 can be used: `images`"
    ):
        Trainer(workload, config(), 0)


@pytest.mark.slow
def test_a_dataset_that_is_large_enough_for_one_variant_is_tried_out(tmp_path: Path) -> None:
    for number in range(2):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    params = {"images": str(tmp_path), "max_images": 1, "num_workers": 0}
    variants = (VariantConfig("large", (2,), 1), VariantConfig("small", (1,), 1))
    trainer = Trainer(built("resnet50", params, tmp_path), replace(config(), variants=variants), 0)
    trainer.prepare(variants[1], 0)
    with pytest.raises(ParamsError, match="needs 2 images, but only 1 can"):
        trainer.prepare(variants[0], 0)
