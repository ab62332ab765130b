"""The built-in workloads: real text, known durations, and finite gradients."""

import itertools
import os
import sysconfig
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from gpurun import Workload, device_index, on_device
from gpurun.launcher.errors import ParamsError
from gpurun.launcher.jobfile.kinds import default_batch
from gpurun.launcher.worker.training.try_out import Counting
from gpurun.workloads import images
from gpurun.workloads.classics import Bottleneck
from gpurun.workloads.gpt import corpus, open_corpus, random_windows
from gpurun.workloads.images import image_workload, read_directory
from gpurun.workloads.registry import BUILTINS
from gpurun.workloads.sleep import Sleep
from tests.known import known
from tests.unit.workloads.loaded import draw, loaded
from tests.whole import first
from tests.wording import Wording

SMALL = {"gpt": {"layers": 1, "width": 16, "heads": 2, "context": 8}, "mlp": {"width": 8}, "sleep": {}}
TRAINING = sorted(name for name, builtin in BUILTINS.items() if builtin.kind == "training")
LARGE = {"fcn_s", "alexnet_s", "vit_b16", "resnet50"}
"""Tens of millions of parameters: their shapes are checked on the meta device, which holds nothing."""


@pytest.mark.parametrize("name", [name for name in TRAINING if name not in LARGE])
def test_every_builtin_trains(name: str, tmp_path: Path) -> None:
    workload = loaded(name, SMALL.get(name, {}), tmp_path)
    inputs, targets = draw(workload, 5)
    known(workload.loss)(workload.model(inputs), targets).backward()
    gradients = [parameter.grad for parameter in workload.model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert any(gradient is not None and gradient.any() for gradient in gradients)


@pytest.mark.parametrize("name", [name for name in TRAINING if name not in LARGE])
def test_a_batch_depends_on_its_generator_alone(name: str, tmp_path: Path) -> None:
    workload = loaded(name, SMALL.get(name, {}), tmp_path)
    torch.manual_seed(1)
    first = draw(workload, 3, seed=7)
    torch.manual_seed(2)
    again = draw(workload, 3, seed=7)
    other = draw(workload, 3, seed=8)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_the_text_is_the_standard_librarys() -> None:
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py")).read_bytes()
    assert bytes(corpus()[: len(first)].tolist()) == first


def test_targets_of_gpt_are_the_next_bytes(tmp_path: Path) -> None:
    workload = loaded("gpt", SMALL["gpt"], tmp_path)
    inputs, targets = draw(workload, 4)
    assert inputs.shape == targets.shape == (4, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_windows_reach_the_end_of_the_text() -> None:
    length = len(corpus())
    assert torch.equal(random_windows(1, length, torch.Generator(), corpus())[0], corpus().long())


def test_gpt_sees_no_future(tmp_path: Path) -> None:
    workload = loaded("gpt", SMALL["gpt"], tmp_path)
    model = workload.model
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 99
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_sleep_lasts_alpha_plus_beta_b_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("gpurun.workloads.sleep.time.sleep", slept.append)
    model = Sleep([10.0, 20.0], 0.5)
    for index, samples in itertools.product((0, 1), (1, 4)):
        with on_device(index):
            model(torch.zeros(samples, 1))
    assert slept == pytest.approx([0.0105, 0.012, 0.0205, 0.022])
    Sleep(0.0, 0.0)(torch.zeros(4, 1))
    assert len(slept) == 4


def test_sleep_says_when_its_list_is_too_short() -> None:
    with on_device(2), pytest.raises(ValueError, match="times for 2 devices"):
        Sleep([1.0, 2.0], 0.0)(torch.zeros(1, 1))


def test_device_index_comes_back() -> None:
    with on_device(3):
        with on_device(1):
            assert device_index() == 1
        assert device_index() == 3
    assert device_index() == 0


# The networks of Shi et al. 2016 and of today have the parameters and operations that are published


CLASSICS = {
    "fcn_s": (117_997_696, 64, 38.3),
    "alexnet_s": (62_378_344, 16, 105.6),
    "resnet50": (25_557_032, 16, 366.6),
    "fcn_r": (14_205_962, 1024, 83.9),
    "alexnet_r": (85_098, 1024, 60.9),
    "resnet56": (855_050, 128, 96.3),
    "lstm": (6_182_672, 128, 88.7),
}
"""Parameters, batch, and GFLOP of forward and backward per batch."""


def on_meta(name: str, **params: object) -> Workload:
    """A workload whose weights take no memory and no time."""
    corpus()  # the text must not be read onto the meta device
    with torch.device("cpu" if name == "lstm" else "meta"):  # an LSTM on meta makes torch import for seconds
        return loaded(name, params, Path())


def num_parameters(workload: Workload) -> int:
    return sum(parameter.numel() for parameter in workload.model.parameters())


@pytest.mark.parametrize("name", CLASSICS)
def test_classics_are_as_published(name: str) -> None:
    parameters, batch, _ = CLASSICS[name]
    assert num_parameters(on_meta(name)) == parameters
    assert default_batch(name) == batch


@pytest.mark.parametrize("name", ["lstm", *first(2, [name for name in CLASSICS if name != "lstm"])])
def test_a_step_of_a_classic_takes_the_published_operations(name: str) -> None:
    """On the CPU that of the LSTM, whose recurrent operator needs our formula."""
    workload = on_meta(name)
    first = next(workload.model.parameters())
    inputs, targets = draw(workload, 2)
    with Counting() as counting:
        known(workload.loss)(workload.model(inputs.to(first.device)), targets.to(first.device)).backward()
    assert counting.known_flops is not None
    assert counting.known_flops / 2 * CLASSICS[name][1] / 1e9 == pytest.approx(CLASSICS[name][2], abs=0.06)


@pytest.mark.parametrize(
    ("name", "params", "parameters"),
    [
        ("gpt", {"preset": "124M"}, 124_439_808),
        ("gpt", {}, 3_323_392),
        ("vit_b16", {}, 86_567_656),
        ("resnet50", {"version": 1.5}, 25_557_032),
    ],
)
def test_modern_networks_have_their_parameters(name: str, params: dict[str, object], parameters: int) -> None:
    assert num_parameters(on_meta(name, **params)) == parameters


def test_versions_of_resnet_differ_in_where_the_stride_is() -> None:
    for version, strides in ((1.0, [2, 1, 1]), (1.5, [1, 2, 1])):
        layers = Bottleneck(256, 128, 2, version).residual
        assert [layer.stride[0] for layer in layers if isinstance(layer, nn.Conv2d)] == strides


def test_images_become_classes_in_the_vision_transformer() -> None:
    assert on_meta("vit_b16").model(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_gradients_of_the_vision_transformer_lie_in_memory_as_its_parameters() -> None:
    model = on_meta("vit_b16").model  # else DDP copies them, and torch warns
    model(torch.zeros(1, 3, 224, 224, device="meta")).sum().backward()
    strides = {
        name: (p.stride(), p.grad.stride()) for name, p in model.named_parameters() if p.grad is not None
    }
    assert {name for name, (own, gradient) in strides.items() if own != gradient} == set()
    assert "class_token" in strides


def test_the_last_layer_gives_logits() -> None:
    *_, last = on_meta("fcn_r").model.children()
    assert isinstance(last, nn.Linear)


# Text and images of a person's own: what can't be read is skipped, counted and said


TINY = {"layers": 1, "width": 8, "heads": 1, "context": 4}


def photo(path: Path, colour: tuple[int, int, int] = (255, 0, 0), size: tuple[int, int] = (300, 200)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def test_directories_are_classes_and_images_are_normalised_squares(tmp_path: Path) -> None:
    photo(tmp_path / "cats" / "a.png")
    photo(tmp_path / "dogs" / "b.jpg", (0, 0, 0), (100, 300))
    dataset = read_directory(tmp_path, 10).dataset
    (cat, first), (dog, second) = dataset[0], dataset[1]
    assert (first, second) == (0, 1)
    assert cat.shape == dog.shape == (3, 224, 224)
    assert torch.allclose(cat[:, 5, 5], torch.tensor([2.2489, -2.0357, -1.8044]), atol=1e-3)
    assert torch.allclose(dog[:, 5, 5], torch.tensor([-2.1179, -2.0357, -1.8044]), atol=1e-2)


def test_broken_images_are_skipped_counted_and_said(tmp_path: Path, wording: Wording) -> None:
    whole = photo(tmp_path / "a.jpg", size=(600, 600))
    photo(tmp_path / "b.png")
    (tmp_path / "cut.jpg").write_bytes(whole.read_bytes()[:-2000])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("not even counted")
    workload = loaded("resnet50", {"images": str(tmp_path), "num_workers": 0}, tmp_path)
    assert len(workload.dataset) == 2
    (note,) = workload.notes
    wording(note)
    assert "text.png" in note
    assert "gone.jpg" in note


def test_of_many_images_some_are_used(tmp_path: Path) -> None:
    for number in range(7):
        photo(tmp_path / f"{number}.png", size=(8, 8))
    names = [path.name for path, _ in read_directory(tmp_path, 3).dataset.files]
    assert names == ["0.png", "2.png", "4.png"]


@pytest.mark.parametrize(
    "make",
    [
        lambda directory: None,
        lambda directory: (directory / "x.png").write_text("x"),
        lambda directory: directory.rmdir(),
        lambda directory: (directory.rmdir(), directory.write_text("")),
    ],
)
def test_a_directory_without_images_is_refused(tmp_path: Path, make: object, wording: Wording) -> None:
    directory = tmp_path / "images"
    directory.mkdir()
    make(directory)  # type: ignore[operator]
    with pytest.raises(ValueError, match="image") as refused:
        read_directory(directory, 10)
    wording(str(refused.value))


def test_text_is_that_of_all_files_in_order_and_the_rest_is_said(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "b.txt").write_text("world")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_text("hello ")
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    (tmp_path / "d.txt").write_text("")
    found = open_corpus(str(tmp_path))
    assert bytes(found.text.tolist()) == b"hello world"
    wording(found.notes)
    workload = loaded("gpt", {**TINY, "text": str(tmp_path)}, tmp_path)
    assert workload.notes == found.notes
    assert set(draw(workload, 50)[0].flatten().tolist()) <= set(b"hello world")


def test_a_few_skipped_files_are_all_named(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "a.txt").write_text("hello")
    for number in range(7):
        (tmp_path / f"{number}.bin").write_bytes(b"\0")
    (note,) = open_corpus(str(tmp_path)).notes
    wording(note)
    for number in (5, 6):
        (tmp_path / f"{number}.bin").unlink()
    (note,) = open_corpus(str(tmp_path)).notes
    assert note.endswith("3.bin (binary), 4.bin (binary)")


@pytest.mark.parametrize("content", [None, b"", b"\0", b"abc"])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes | None, wording: Wording) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with wording.raises(ParamsError):
        loaded("gpt", {**TINY, "text": str(path)}, tmp_path)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("gpt", {"preset": "125M"}),
        ("gpt", {"vocabulary": 100}),
        ("gpt", {"layers": 0}),
        ("gpt", {"width": 10, "heads": 4}),
        ("gpt", {**TINY, "learning_rate": -1}),
        ("gpt", {**TINY, "context": 100_000_000}),  # longer than the built-in text
        ("resnet50", {"num_workers": -1}),
        ("resnet50", {"num_workers": 100_000}),
    ],
)
def test_params_that_cannot_be_are_refused(
    tmp_path: Path, name: str, params: dict[str, object], wording: Wording
) -> None:
    with wording.raises(ParamsError):
        loaded(name, params, tmp_path)


def test_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("hello")
    photo(tmp_path / "images" / "a.png")
    assert bytes(open_corpus("~/a.txt").text.tolist()) == b"hello"
    workload = loaded("resnet50", {"images": "~/images", "num_workers": 0}, tmp_path)
    assert len(workload.dataset) == 1
    with pytest.raises(ValueError, match=f"^the text {tmp_path}/nope does not exist$"):
        open_corpus("~/nope")


def test_files_that_are_none_are_named_with_their_directory(tmp_path: Path, wording: Wording) -> None:
    for kind in ("txt", "png"):
        directory = tmp_path / kind / "cat"
        directory.mkdir(parents=True)
        (directory / f"gone.{kind}").symlink_to(directory / "nowhere")
        (directory / f"null.{kind}").symlink_to("/dev/null")
        os.mkfifo(directory / f"pipe.{kind}")
    (tmp_path / "txt" / "a.txt").write_text("hello")
    photo(tmp_path / "png" / "a.png")
    (text,) = open_corpus(str(tmp_path / "txt")).notes
    wording(text)
    assert read_directory(tmp_path / "png", 10).skipped == (
        ("cat/gone.png", "a link to nothing"),
        ("cat/null.png", "not a regular file"),
        ("cat/pipe.png", "not a regular file"),
    )


def test_more_directories_than_classes_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(images, "CLASSES", 2)
    for name in ("cats", "dogs"):
        photo(tmp_path / name / "a.png")
    notes = load_images(tmp_path).notes
    assert notes == ()
    photo(tmp_path / "foxes" / "a.png")
    workload = load_images(tmp_path)
    wording(workload.notes)
    assert [workload.dataset[i][1] for i in range(3)] == [0, 1, 0]


def load_images(directory: Path) -> Workload:
    return image_workload(nn.Linear(1, 1), str(directory), max_images=10, num_workers=0)
