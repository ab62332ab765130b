"""Addresses and interfaces of this node, as the other nodes see them."""

import ipaddress
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.machine import LOOPBACK
from gpurun.launcher.machine.accelerators import CPU


class UnknownHost(MachineError):
    """The name of the rendezvous host doesn't resolve, or not yet."""


@dataclass(frozen=True)
class NodeAddress:
    """The place of this node in the network."""

    rendezvous: str
    """IP address of the rendezvous host, as this node resolves it."""
    address: str
    """This node's own IP address towards it."""
    interface: str
    """The interface that has this address, or the chosen one."""


def find_address(host: str, port: int, interface: str | None, environ: Mapping[str, str]) -> NodeAddress:
    """This node's address and interface: those that reach the rendezvous host, unless one is chosen.

    Args:
        interface: the chosen one, or its address; else that of GLOO_SOCKET_IFNAME in `environ`.

    Raises:
        UnknownHost: the host name doesn't resolve.
        MachineError: no interface leads there.
        SpecError: there is no interface of the chosen name.
    """
    rendezvous = resolve(host, port)
    chosen = interface or environ.get(CPU.interface_variable)
    known = interfaces()
    if chosen:
        chosen = next((name for name, addresses in known.items() if chosen in addresses), chosen)
        if chosen not in known:
            raise SpecError(
                f"{platform.node()} has no network interface {chosen!r}; it has {', '.join(sorted(known))}"
            )
        return NodeAddress(rendezvous, _same_family(known[chosen], rendezvous, chosen), chosen)
    address = own_address(rendezvous, port)
    names = [name for name, addresses in known.items() if address in addresses]
    if not names:
        raise MachineError(
            f"no network interface of {platform.node()} has its address {address}; name one: --interface NAME"
        )
    return NodeAddress(rendezvous, address, names[0])


def resolve(host: str, port: int) -> str:
    """The host's first IP address.

    Raises:
        UnknownHost: the name doesn't resolve.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnknownHost(
            f"the rendezvous host {host!r} does not resolve on {platform.node()}: {reason}\n"
            "    check the name, or give an IP address: --rendezvous 10.0.0.1:29400"
        ) from error
    return str(found[0][4][0])


def own_address(towards: str, port: int) -> str:
    """The address from which this node would speak to `towards`; nothing is sent.

    Raises:
        MachineError: there is no way there.
    """
    with socket.socket(family_of(towards), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, port))
        except OSError as error:
            raise MachineError(
                f"{platform.node()} can't reach the rendezvous host {towards}: {error.strerror}"
            ) from error
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, list[str]]:
    """IP addresses by interface."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def carried_gb_per_s(interface: str) -> float | None:
    """The rate of an interface in one direction, in GB/s; `None` where its driver doesn't give it."""
    import psutil

    found = psutil.net_if_stats().get(interface)
    return found.speed / 8000 if found and found.speed > 0 else None


def check_loopback() -> None:
    """Refuses a machine whose ranks would wait for each other until they are taken for hung.

    Raises:
        MachineError: nothing leads to the address at which the ranks of a machine meet.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((LOOPBACK, 1))  # nothing is sent
        except OSError as error:
            raise MachineError(
                f"the ranks can't meet at {LOOPBACK}: {error.strerror}\n"
                "    bring the loopback interface up: ip link set lo up"
            ) from error


def is_own(address: str) -> bool:
    """Whether this node has the address."""
    return any(address in addresses for addresses in interfaces().values())


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _same_family(addresses: list[str], other: str, name: str) -> str:
    matching = [address for address in addresses if family_of(address) == family_of(other)]
    if not matching:
        kind = "IPv6" if ":" in other else "IPv4"
        raise SpecError(f"the network interface {name!r} of {platform.node()} has no {kind} address")
    return matching[0]
