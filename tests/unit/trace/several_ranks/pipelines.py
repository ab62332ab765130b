"""Schedules of a pipeline: when each stage computes, sends and receives, in whole µs."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """From when to when a stage sends or receives, and for which micro-batch."""

    source: int
    target: int
    micro_batch: int
    send_us: int
    """The sender is ready."""
    receive_us: int
    """The receiver asks."""
    end_us: int


@dataclass(frozen=True)
class Schedule:
    """One step."""

    compute: dict[int, list[tuple[int, int]]]
    """Start and end by stage."""
    messages: list[Message]


def one_forward_one_backward(
    stages: int, micro_batches: int, forward_us: int, backward_us: int, message_us: int
) -> Schedule:
    """A step of 1F1B: stage s runs stages − s − 1 forward passes, then one of each in turns."""
    todo = {stage: list(_order(stages, stage, micro_batches)) for stage in range(stages)}
    free, done = dict.fromkeys(range(stages), 0), dict[tuple[str, int, int], int]()
    found = Schedule({stage: [] for stage in range(stages)}, [])
    while any(todo.values()):
        for stage in range(stages):
            while todo[stage]:
                kind, micro_batch = todo[stage][0]
                source = stage - 1 if kind == "forward" else stage + 1
                if 0 <= source < stages:
                    ready_us = done.get((kind, source, micro_batch))
                    if ready_us is None:
                        break
                    end_us = max(ready_us, free[stage]) + message_us
                    found.messages.append(Message(source, stage, micro_batch, ready_us, free[stage], end_us))
                    free[stage] = end_us
                todo[stage].pop(0)
                start_us = free[stage]
                free[stage] += forward_us if kind == "forward" else backward_us
                found.compute[stage].append((start_us, free[stage]))
                done[kind, stage, micro_batch] = free[stage]
    return found


def _order(stages: int, stage: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    ahead = min(stages - stage - 1, micro_batches)
    yield from (("forward", i) for i in range(ahead))
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            yield "forward", i + ahead
        yield "backward", i
