"""Samples and their classes: random ones of any shape, or images of 224² from a directory."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpurun.workloads.base import Batch, Workload
from gpurun.workloads.limits import check, listed, name_in, not_there, path_of, why_no_file

if TYPE_CHECKING:
    from PIL.Image import Image


IMAGE_PIXELS = 224
CLASSES = 1000
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff"})
CHECK_PIXELS = 32
"""A JPEG file is decoded at the smallest size that is not below this one when it is checked."""

MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
"""Deviation of ImageNet's red, green and blue. Source: https://docs.pytorch.org/vision/stable/models.html"""


@dataclass(frozen=True)
class ImageFolder:
    """A map-style dataset of (3, 224, 224) float images and their classes."""

    files: tuple[tuple[Path, int], ...]
    """Readable images, each with the number of its directory."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        return pixels(path), label % CLASSES


@dataclass(frozen=True)
class FoundImages:
    """The files in a directory."""

    dataset: ImageFolder
    skipped: tuple[tuple[str, str], ...]
    """Files that can't be read as images, by their names in the directory, each with the reason."""
    num_classes: int
    """Directories in it; 1 where there are none."""


def image_workload(
    model: nn.Module,
    images: str,
    max_images: int,
    num_workers: int,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Workload:
    """A classifier of 224² images into 1000 classes, on random images or on those of the directory `images`.

    Raises:
        ValueError: the directory is missing or has no readable image, or there can't be as many workers.
    """
    check(num_workers=num_workers)
    if not images:
        return Workload(
            model, classified((3, IMAGE_PIXELS, IMAGE_PIXELS), CLASSES), F.cross_entropy, optimizer=optimizer
        )
    found = read_directory(path_of(images), max_images)
    return Workload(
        model,
        None,
        F.cross_entropy,
        optimizer=optimizer,
        dataset=found.dataset,
        num_workers=num_workers,
        notes=(*skipped_notes(images, found), *folded_notes(found)),
    )


def read_directory(directory: Path, max_images: int) -> FoundImages:
    """The images in a directory; the directories in it are classes, in the order of their names.

    Every file that is used is opened and decoded once, small, so that a broken one shows before the run.

    Raises:
        ValueError: the directory is missing, empty, or holds no image that can be read.
    """
    check(max_images=max_images)
    if not directory.exists():
        raise ValueError(not_there("image directory", directory))
    if not directory.is_dir():
        raise ValueError(f"the image directory {directory} is a file")
    files = list(labelled_files(directory))
    if not files:
        endings = " ".join(sorted(SUFFIXES))
        raise ValueError(f"the image directory {directory} contains no images; image files end in {endings}")
    chosen = (
        [files[i * len(files) // max_images] for i in range(max_images)] if len(files) > max_images else files
    )
    with ThreadPoolExecutor() as pool:
        problems = list(pool.map(why_unreadable, (path for path, _ in chosen)))
    readable = tuple(file for file, problem in zip(chosen, problems, strict=True) if problem is None)
    named = ((name_in(directory, path), why) for (path, _), why in zip(chosen, problems, strict=True))
    skipped = tuple((name, why) for name, why in named if why is not None)
    if not readable:
        name, why = skipped[0]
        raise ValueError(
            f"none of the {len(chosen)} images in {directory} can be read, such as {name}: {why}"
        )
    return FoundImages(ImageFolder(readable), skipped, 1 + max(label for _, label in files))


def labelled_files(directory: Path) -> Iterator[tuple[Path, int]]:
    """Images with the numbers of their directories; those in `directory` itself belong to number 0."""
    classes = sorted(path for path in directory.iterdir() if path.is_dir())
    for label, place in enumerate([directory, *classes]):
        paths = place.iterdir() if place == directory else place.rglob("*")
        for path in sorted(paths):
            if path.suffix.lower() in SUFFIXES and not path.is_dir():
                yield path, max(0, label - 1)


def why_unreadable(path: Path) -> str | None:
    """The reason why a file can't be used as an image; `None` if there is none."""
    from PIL import Image

    if problem := why_no_file(path):
        return problem
    try:
        with Image.open(path) as image:
            image.draft("RGB", (CHECK_PIXELS, CHECK_PIXELS))
            image.load()
    except Exception as error:  # a broken file may make a decoder raise anything
        return (str(error) or type(error).__name__).replace(str(path), path.name)
    return None


def pixels(path: Path) -> Tensor:
    """The middle square of an image, scaled to 224² and normalised, as float32 of shape (3, 224, 224)."""
    from PIL import Image

    with Image.open(path) as image:
        image.draft("RGB", (IMAGE_PIXELS, IMAGE_PIXELS))
        square = middle(image.convert("RGB")).resize((IMAGE_PIXELS, IMAGE_PIXELS), Image.Resampling.BILINEAR)
    raw: Any = bytearray(square.tobytes())
    channels = torch.frombuffer(raw, dtype=torch.uint8).view(IMAGE_PIXELS, IMAGE_PIXELS, 3).permute(2, 0, 1)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return (channels.float() / 255 - mean) / deviation


def middle(image: "Image") -> "Image":
    """The largest square in the middle of an image."""
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    return image.crop((left, top, left + side, top + side))


def skipped_notes(images: str, found: FoundImages) -> tuple[str, ...]:
    """The notes about files that were left out."""
    if not found.skipped:
        return ()
    named = listed([f"{name} ({why})" for name, why in found.skipped])
    total = len(found.skipped) + len(found.dataset)
    count = len(found.skipped)
    return (
        f"{count} of {total} files in {images} can't be read as images and "
        f"{'is' if count == 1 else 'are'} skipped: {named}",
    )


def folded_notes(found: FoundImages) -> tuple[str, ...]:
    """The notes where there are more directories than classes."""
    if found.num_classes <= CLASSES:
        return ()
    return (
        f"{found.num_classes:,} class directories for {CLASSES:,} outputs: "
        f"labels are taken modulo {CLASSES:,}",
    )


POOL_SAMPLES = 32
"""Different samples. A batch picks some of them: drawing each number again would take longer than many a step
that trains on them."""


def classified(shape: tuple[int, ...], classes: int) -> Batch:
    """A `batch` of normal random samples of `shape`, each with a random class of `classes`.

    The samples come from a small pool that is the same in every process; which ones, and their classes, from
    the generator alone.
    """
    pool: list[Tensor] = []

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if not pool:
            pool.append(torch.randn(POOL_SAMPLES, *shape, generator=torch.Generator().manual_seed(0)))
        chosen = torch.randint(POOL_SAMPLES, (size,), generator=generator)
        return pool[0][chosen], torch.randint(classes, (size,), generator=generator)

    return batch
