"""What a host's name or address says of who can reach it. Pure."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`: all of 127.0.0.0/8, ::1 (also in brackets, or with
    an IPv4 loopback address mapped into it), and the name localhost. Other names are not looked
    up, and are taken for reachable."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
