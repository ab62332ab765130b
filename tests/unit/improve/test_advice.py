"""Advice on what can't be changed from outside."""

from pathlib import Path

from gpurun.launcher.improve.improve import advice_on
from gpurun.launcher.rundir.improvement import Advice
from gpurun.launcher.rundir.records import Observed, Place

HOME = Path("/home/me")
TRAIN = "/home/me/train.py"
ITEM, COPY = Place("wait", "item", TRAIN, 31, 47), Place("copy", "to", TRAIN, 20, 47)


def advice(*places: Place, steps: int = 47) -> list[Advice]:
    return list(advice_on(Observed(steps=steps, places=places), HOME))


def test_what_each_step_does_is_advised_on_in_the_order_of_the_lines() -> None:
    assert advice(ITEM, COPY) == [
        Advice(
            "train.py:20",
            "to() waits for a copy in each step: `pin_memory=True` of the DataLoader and `non_blocking=True` "
            "here let it go on",
        ),
        Advice(
            "train.py:31",
            "item() waits for the GPU in each step: read the value in fewer steps, or keep it on the GPU",
        ),
    ]


def test_what_few_steps_do_is_left() -> None:
    assert advice(ITEM, COPY, steps=470) == advice(ITEM, steps=0) == []


def test_accumulated_gradients_are_sent_once() -> None:
    backward = Place("gradients", "backward", TRAIN, 25, 4 * 47)
    (found,) = advice(backward)
    assert found.text.startswith("4 backward passes for each step send gradients: `with model.no_sync():`")
    assert advice(backward, steps=4 * 47) == []
