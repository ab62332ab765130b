"""What a launch reports while it measures its devices."""

from types import SimpleNamespace
from typing import Any

from gpurun.launcher.balance import Calibration
from gpurun.launcher.worker.training.balanced_split import with_progress


def test_every_block_is_a_sign_of_life() -> None:
    entered: list[tuple[str, str]] = []
    journal: Any = SimpleNamespace(enter=lambda *where: entered.append(where))
    blocks = 0

    def measure(split: tuple[int, ...], num_steps: int) -> list[float]:
        nonlocal blocks
        blocks += 1
        assert len(entered) == blocks  # before the block: it may be the one that hangs
        return [1.0 * size for size in split]

    Calibration(with_progress(measure, journal, "v"), 64, 1, (99, 99), 1 << 40, "seed").run()
    assert set(entered) == {("balance", "v")}
