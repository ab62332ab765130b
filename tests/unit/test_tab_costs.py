"""What the tab says of balanced splits and of batches: as the terminal does, and by the sample."""

from dataclasses import replace
from pathlib import Path

import msgspec

from gpurun.launcher.compare.model import Balanced, Comparison, DeviceCost, Difference, SplitCost
from gpurun.launcher.tensorboard_plugin.answers.sentences import cost_sentences, headline

COMPARISON = msgspec.json.decode(
    (Path(__file__).resolve().parents[1] / "data" / "comparison.json").read_bytes(), type=Comparison
)
COSTS = tuple(
    DeviceCost(f"cuda:{rank}", 5.0, None, 1.0, None, True, ((8, 13.0), (16, 21.0)), None) for rank in range(2)
)
FOUND = Balanced(COSTS, 37.0, 0.5, 37.5, 38.0, 37 / 38, SplitCost((32, 32), 37.5), None, ("ddp-2-even",))


def test_of_a_balanced_split_it_says_what_the_terminal_says() -> None:
    even = replace(COMPARISON.variants[0], id="ddp-2-even")
    one = replace(even, id="ddp-2-balanced", split_name="balanced", balanced=FOUND)
    other = replace(one, id="ddp-2-other")
    assert cost_sentences(one, (even, one, other)) == [
        "Predicted 37.5 ms: T* = 37.0, which no split of whole samples beats, + 0.500 overhead;"
        " measured 38.0: T*/T = 0.97.",
        "By the same figures even would take (32/32) 37.5 ms.",
        "These are the samples of ddp 32/32 too: both were measured.",
    ]
    assert cost_sentences(even, (even, one)) == []


def test_the_headline_compares_different_batches_by_the_sample() -> None:
    base = COMPARISON.variants[0]
    assert base.global_batch == 64
    large = replace(COMPARISON.variants[1], global_batch=128)
    best = replace(large, vs_baseline=Difference(-4.9, (-5.7, -4.1), "faster"))
    found = replace(COMPARISON, variants=(base, best), fastest=best.id, baseline=base.id)
    assert headline(found) == "ddp 48/16 takes 4.9 % less time per sample than ddp 32/32."
    behind = replace(large, vs_baseline=Difference(13.8, (13.0, 14.6), "slower"))
    found = replace(COMPARISON, variants=(base, behind), fastest=base.id, baseline=base.id)
    assert headline(found) == (
        "ddp 32/32 is the fastest; the next, ddp 48/16, takes 13.8 % more time per sample."
    )
