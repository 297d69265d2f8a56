"""Packet captures: pcap and pcapng files, and the TCP segments in their packets. dpkt does the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import dpkt

from headwater.errors import CaptureError
from headwater.protocol.capture.pcapng_file import is_pcapng, read_pcapng_packets
from headwater.protocol.capture.tcp_streams import Endpoint, Segment

_PCAP_MAGICS = frozenset(
    number.to_bytes(4, order)
    for number in (dpkt.pcap.TCPDUMP_MAGIC, dpkt.pcap.TCPDUMP_MAGIC_NANO, dpkt.pcap.MODPCAP_MAGIC)
    for order in ("big", "little")
)
_LINK_TYPE_BITS = 0xFFFF
"""The upper half of a pcap file's link type says how long the frame check sequence is."""


def is_packet_capture(data: bytes) -> bool:
    return data[:4] in _PCAP_MAGICS or is_pcapng(data)


# --- the file -----------------------------------------------------------------------------------------------------


def read_segments(data: bytes) -> Iterator[Segment]:
    """The TCP segments that carry something, in the file's order. Packets are numbered as Wireshark does."""
    packets = read_pcapng_packets(data) if is_pcapng(data) else _read_pcap_packets(data)
    for number, (link_type, packet) in enumerate(packets, 1):
        strip = _LINK_TYPES.get(link_type)
        if strip is None:
            raise CaptureError(
                f"packet {number} has link type {link_type}, which is not supported",
                hint="Capture on Ethernet, loopback, Linux `any` or raw IP",
            )
        segment = _segment(number, strip, packet)
        if segment is not None and (segment.payload or segment.syn):
            yield segment


def _read_pcap_packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    try:
        reader = dpkt.pcap.Reader(BytesIO(data))
    except (ValueError, dpkt.Error) as error:
        raise CaptureError(
            "the input is no pcap or pcapng file",
            hint="Give the format as hex or raw, or let it be found",
        ) from error
    link_type = reader.datalink() & _LINK_TYPE_BITS
    packets = iter(reader)
    number = 0
    while True:
        number += 1
        try:
            _, packet = next(packets)
        except StopIteration:
            return
        except dpkt.Error as error:
            raise CaptureError(
                f"the pcap file is cut off in packet {number}",
                hint="Let the capture finish before you copy it (`tcpdump -U` writes packet by packet)",
            ) from error
        yield link_type, packet


# --- the layers ---------------------------------------------------------------------------------------------------
# dpkt decodes every protocol it knows inside a packet. Only TCP is wanted here, and nothing else is to be trusted
# with damaged bytes, so its tables of inner protocols are cut down.


class _Ip(dpkt.ip.IP):  # type: ignore[misc]  # dpkt has no types
    _protosw = {dpkt.ip.IP_PROTO_TCP: dpkt.tcp.TCP}  # noqa: RUF012  (dpkt's own name and form)


class _Ip6(dpkt.ip6.IP6):  # type: ignore[misc]
    _protosw = {dpkt.ip.IP_PROTO_TCP: dpkt.tcp.TCP}  # noqa: RUF012


_IP_BY_ETHERTYPE = {dpkt.ethernet.ETH_TYPE_IP: _Ip, dpkt.ethernet.ETH_TYPE_IP6: _Ip6}
_VLAN_TYPES = frozenset({dpkt.ethernet.ETH_TYPE_8021Q, dpkt.ethernet.ETH_TYPE_8021AD, dpkt.ethernet.ETH_TYPE_QINQ1})
_IP_BY_VERSION = {4: _Ip, 6: _Ip6}
_VLAN_TAGS_MAX = 2


def _of_ethertype(ethertype: int, packet: bytes) -> Any:
    ip = _IP_BY_ETHERTYPE.get(ethertype)
    return None if ip is None else ip(packet)


def _ethernet(packet: bytes) -> Any:
    at = 12
    for _ in range(_VLAN_TAGS_MAX):
        if int.from_bytes(packet[at : at + 2], "big") in _VLAN_TYPES:
            at += 4
    return _of_ethertype(int.from_bytes(packet[at : at + 2], "big"), packet[at + 2 :])


def _linux_cooked(packet: bytes) -> Any:
    return _of_ethertype(int.from_bytes(packet[14:16], "big"), packet[16:])


def _linux_cooked_v2(packet: bytes) -> Any:
    return _of_ethertype(int.from_bytes(packet[:2], "big"), packet[20:])


def _raw_ip(packet: bytes) -> Any:
    ip = _IP_BY_VERSION.get(packet[0] >> 4) if packet else None
    return None if ip is None else ip(packet)


def _loopback(packet: bytes) -> Any:
    # Four bytes name the address family, each system with its own numbers; the packet itself is plainer.
    return _raw_ip(packet[4:])


_RAW_IP_ON_OPENBSD = 14
_LINK_TYPES: dict[int, Callable[[bytes], Any]] = {
    dpkt.pcap.DLT_NULL: _loopback,
    108: _loopback,  # OpenBSD's
    dpkt.pcap.DLT_EN10MB: _ethernet,
    dpkt.pcap.DLT_LINUX_SLL: _linux_cooked,
    dpkt.pcap.DLT_LINUX_SLL2: _linux_cooked_v2,
    12: _raw_ip,
    _RAW_IP_ON_OPENBSD: _raw_ip,
    101: _raw_ip,
    dpkt.pcap.DLT_IPV4: _raw_ip,
    dpkt.pcap.DLT_IPV6: _raw_ip,
}


def _segment(number: int, strip: Callable[[bytes], Any], packet: bytes) -> Segment | None:
    """The TCP segment in a packet, or None: other protocols, later fragments and cut headers carry none.

    Bytes of a connection that are lost this way show as a gap in its sequence numbers.
    """
    try:
        ip = strip(packet)
    except dpkt.Error:
        return None
    tcp = None if ip is None else ip.data
    if not isinstance(tcp, dpkt.tcp.TCP):
        return None
    return Segment(
        number=number,
        source=Endpoint(bytes(ip.src), tcp.sport),
        destination=Endpoint(bytes(ip.dst), tcp.dport),
        sequence=tcp.seq,
        syn=bool(tcp.flags & dpkt.tcp.TH_SYN),
        ack=bool(tcp.flags & dpkt.tcp.TH_ACK),
        payload=bytes(tcp.data),
    )
