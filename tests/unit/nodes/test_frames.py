"""What the two ends of a connection know without a network: order, frames, silence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.nodes.messages import LogText, encode
from gpurun.launcher.nodes.transport.exchange import (
    CLOSED_S,
    MessageLane,
    Silence,
    StreamFrame,
    decode_frame,
    encode_frame,
)


@given(st.lists(st.sampled_from(["put", "send", "lose", "reconnect"]), max_size=60))
def test_every_message_arrives_once_and_in_order_however_often_the_stream_breaks(steps: list[str]) -> None:
    ours, theirs = MessageLane(), MessageLane()
    sent: list[bytes] = []
    arrived: list[bytes] = []
    lost = False

    def pass_on() -> None:
        for one, other in ((ours, theirs), (theirs, ours)):
            while not lost and (frame := one.next_frame()) is not None:
                payload = other.accept(decode_frame(encode_frame(frame)))
                arrived.extend([payload] if payload is not None else [])

    for step in [*steps, "reconnect"]:
        if step == "put":
            sent.append(str(len(sent)).encode())
            ours.put(sent[-1])
        elif step == "lose":
            lost = True
            ours.next_frame()
        elif step == "reconnect":
            lost = False
            ours.rewind()
            theirs.rewind()
        pass_on()
    assert arrived == sent
    assert ours.is_settled
    assert theirs.is_settled


@pytest.mark.parametrize(
    "frame", [StreamFrame(2, 0), StreamFrame(0, 1), StreamFrame(-1, 0), StreamFrame(2**62, 0)]
)
def test_a_frame_that_no_end_would_send_is_refused(frame: StreamFrame) -> None:
    with pytest.raises(ValueError, match="confirming"):
        MessageLane().accept(frame)


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x93\x01\x00\xa1x", encode(LogText("x"))])
def test_other_bytes_are_no_frame(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a frame"):
        decode_frame(content)


def test_only_silence_while_listening_counts() -> None:
    silence = Silence(10.0, 0.0)
    silence.hear(1, 0.0)
    silence.hear(2, 0.0)
    for second in range(1, 10):
        silence.hear(1, float(second))
        assert silence.check(float(second)) is None
    assert silence.check(109.5) is None  # this node was busy or suspended
    assert silence.check(110.4) is None
    assert silence.check(110.6) == (2, pytest.approx(10.1))


def test_a_node_is_lost_sooner_if_ranks_lost_it_or_its_connection_was_closed() -> None:
    closed, cut, suspected = (Silence(30.0, 0.0) for _ in range(3))
    for silence in (closed, cut, suspected):
        silence.hear(1, 0.0)
    closed.close(1, 1.0)  # by the node's kernel: it was heard a second ago
    cut.close(1, 15.0)  # by our own keepalive
    suspected.suspicious = True
    late = {"closed": closed, "cut": cut, "suspected": suspected}
    found = {name: _lost_after_s(silence) for name, silence in late.items()}
    assert found == {"closed": CLOSED_S + 1, "cut": 31.0, "suspected": 16.0}


def _lost_after_s(silence: Silence) -> float:
    return next(second for second in map(float, range(60)) if silence.check(second) is not None)
