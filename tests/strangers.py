"""What somebody who doesn't know the secret may send to the port of node 0."""

import os
import random
import resource
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpurun.launcher.nodes.messages import End, LogText, StartRanks, encode
from gpurun.launcher.nodes.transport.credentials import identity_from
from gpurun.launcher.nodes.transport.exchange import StreamFrame

Approach = Callable[[socket.socket, random.Random], None]
TIMEOUT_S = 5.0
REFUSED = LogText("a connection from 127.0.0.1 was refused: it didn't prove that it knows this job's secret")
"""What node 0 reports of them, once."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
_MESSAGES = (StartRanks(1, "01", "workload", b"{}", (), {}), End(0, "it is over"))


def noise(stranger: socket.socket, chance: random.Random) -> None:
    """Random bytes, some of which begin like TLS or HTTP/2."""
    start = chance.choice((b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", _PREFACE))
    stranger.sendall(start + chance.randbytes(chance.randrange(1, 400)))


def plain_messages(stranger: socket.socket, chance: random.Random) -> None:
    """Messages of gpurun, in the clear."""
    stranger.sendall(_PREFACE + _frames(chance))


def damaged_handshake(stranger: socket.socket, chance: random.Random) -> None:
    """A TLS handshake with one bit changed."""
    hello = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        _context().wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    content = bytearray(hello.read())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    stranger.sendall(content)


def no_certificate(stranger: socket.socket, chance: random.Random) -> None:
    """Messages through TLS, without a certificate."""
    _through(_context(), stranger, chance)


def forged_certificate(stranger: socket.socket, chance: random.Random) -> None:
    """Messages through TLS, with a certificate that looks right but follows from another secret."""
    _through(_FORGED, stranger, chance)


CRAFTED: tuple[Approach, ...] = (plain_messages, damaged_handshake, no_certificate, forged_certificate)


def approach(port: int, how: Approach, chance: random.Random) -> None:
    """One connection of a stranger; how it ends does not matter."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as stranger:
        how(stranger, chance)


def _through(context: ssl.SSLContext, stranger: socket.socket, chance: random.Random) -> None:
    with context.wrap_socket(stranger) as tls:
        tls.sendall(_PREFACE + _frames(chance))
        while tls.recv(1 << 12):
            pass


def _frames(chance: random.Random) -> bytes:
    return encode(StreamFrame(chance.randrange(3), chance.randrange(3), encode(chance.choice(_MESSAGES))))


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _forged() -> ssl.SSLContext:
    other, context = identity_from(b"not that of the nodes"), _context()
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(other.key + other.certificate)
        context.load_cert_chain(file.name)
    return context


_FORGED = _forged()


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """This process may open `count` more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + count, before[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


SILENT = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = []
for number in range(2000):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
    held[-1].sendall(b"" if number % 2 else b"PRI")
print(flush=True)
input()
"""
