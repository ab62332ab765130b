"""What the tab says of balanced splits and of batches: as the terminal does."""

from dataclasses import replace
from pathlib import Path

import msgspec

from gpurun.launcher.compare.figures.size_curves import Balanced, DeviceCost, SplitCost
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.tensorboard_plugin.answers.sentences import cost_sentences
from tests.wording import Wording

COMPARISON = msgspec.json.decode(
    (Path(__file__).resolve().parents[2] / "data" / "comparison.json").read_bytes(), type=Comparison
)
COSTS = tuple(
    DeviceCost(f"cuda:{rank}", 5.0, None, 1.0, None, True, ((8, 13.0), (16, 21.0)), None) for rank in range(2)
)
FOUND = Balanced(COSTS, 37.0, 0.5, 37.5, 38.0, 37 / 38, SplitCost((32, 32), 37.5), None, ("ddp-2-even",))


def test_of_a_balanced_split_it_says_what_the_terminal_says(wording: Wording) -> None:
    even = replace(COMPARISON.variants[0], id="ddp-2-even")
    one = replace(even, id="ddp-2-balanced", split_name="balanced", balanced=FOUND)
    other = replace(one, id="ddp-2-other")
    wording(cost_sentences(one, (even, one, other)))
    assert cost_sentences(even, (even, one)) == []
