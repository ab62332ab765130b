"""Text and images of a person's own: what can't be read is skipped, counted and said."""

import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from gpurun import Workload
from gpurun.launcher.errors import ParamsError
from gpurun.launcher.worker.training.load_workload import load_workload
from gpurun.workloads import images
from gpurun.workloads.gpt import open_corpus
from gpurun.workloads.images import image_workload, read_directory
from tests.wording import Wording

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
    workload = load_workload("resnet50", {"images": str(tmp_path), "num_workers": 0}, tmp_path)
    assert isinstance(workload, Workload)
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
    workload = load_workload("gpt", {**TINY, "text": str(tmp_path)}, tmp_path)
    assert isinstance(workload, Workload)
    assert workload.notes == found.notes
    assert workload.batch is not None
    assert set(workload.batch(50, torch.Generator().manual_seed(0))[0].flatten().tolist()) <= set(
        b"hello world"
    )


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
    with pytest.raises(ParamsError) as refused:
        load_workload("gpt", {**TINY, "text": str(path)}, tmp_path)
    wording(str(refused.value))


@pytest.mark.parametrize(
    "params", [{"preset": "125M"}, {"vocabulary": 100}, {"layers": 0}, {"width": 10, "heads": 4}]
)
def test_a_shape_that_cannot_be_is_refused(
    tmp_path: Path, params: dict[str, object], wording: Wording
) -> None:
    with pytest.raises(ParamsError) as refused:
        load_workload("gpt", params, tmp_path)
    wording(str(refused.value))


def test_a_learning_rate_and_a_number_of_workers_that_cannot_be_are_refused(
    tmp_path: Path, wording: Wording
) -> None:
    with wording.raises(ParamsError):
        load_workload("gpt", {**TINY, "learning_rate": -1}, tmp_path)
    for count, limit in ((-1, "at least 0"), (100_000, "at most 256")):
        with pytest.raises(ParamsError, match=f"num_workers must be {limit}, but it is {count}"):
            load_workload("resnet50", {"num_workers": count}, tmp_path)


def test_a_context_that_is_too_long_for_the_built_in_text(tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(ParamsError) as refused:
        load_workload("gpt", {**TINY, "context": 100_000_000}, tmp_path)
    wording(str(refused.value))


def test_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("hello")
    photo(tmp_path / "images" / "a.png")
    assert bytes(open_corpus("~/a.txt").text.tolist()) == b"hello"
    workload = load_workload("resnet50", {"images": "~/images", "num_workers": 0}, tmp_path)
    assert isinstance(workload, Workload)
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
