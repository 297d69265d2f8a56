"""The hosts of a connection string, where DNS may list them: SRV records, as for Couchbase Capella and on Kubernetes.

The rule is that of Couchbase's SDKs. The records of `_couchbase._tcp.NAME`, or `_couchbases._tcp.NAME` with TLS, name
hosts and ports, and these take the place of NAME. Where there are none, or DNS does not answer in time, NAME is a host
as any other. TLS then checks certificates against the names that DNS has given: clusters have theirs for these.

The records are asked for every time the hosts are needed, and nothing is kept: whoever asks has lost all that it knew.
This is an edge: it blocks. The DNS library is imported with the first lookup, for most processes never need one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headwater.client.connection_string import HOSTS_MAX, Address, ConnectionString, is_host_name

if TYPE_CHECKING:
    from dns.resolver import Resolver

logger = logging.getLogger(__name__)

LOOKUP_S_MAX = 2.5
"""For all questions together, to all servers and with all search domains."""
SERVER_S_MAX = 1.0
"""For one server to answer one question, so that there is time for another one."""


def find_hosts(where: ConnectionString) -> tuple[Address, ...]:
    """The hosts to ask for the cluster map, in this order: those that DNS lists, or those of the string."""
    if where.srv_name is None:
        return where.addresses
    return _listed(where.srv_name, where) or where.addresses


def _listed(name: str, where: ConnectionString) -> tuple[Address, ...]:
    """What DNS lists under a name; nothing where it does not say."""
    import dns.exception
    import dns.rdtypes.IN.SRV

    try:
        # Names on Kubernetes are short, and whole only with one of the search domains.
        answer = _resolver(where).resolve(name, "SRV", search=where.nameserver is None, lifetime=LOOKUP_S_MAX)
    except (dns.exception.DNSException, OSError) as error:
        logger.debug("no SRV records at %s, so the host is used as it is: %s", name, error)
        return ()
    found: dict[Address, None] = {}
    # Couchbase wants priorities and weights to be 0. Then the order is any; and where they are not, it is theirs.
    for record in answer.rrset.processing_order() if answer.rrset is not None else ():
        assert isinstance(record, dns.rdtypes.IN.SRV.SRV)
        host = record.target.to_text(omit_final_dot=True)
        if is_host_name(host) and record.port:
            found[Address(host, record.port)] = None
    logger.debug("hosts at %s: %s", name, ", ".join(map(str, found)) or "none that can be used")
    return tuple(found)[:HOSTS_MAX]


def _resolver(where: ConnectionString) -> Resolver:
    from dns.resolver import Resolver

    resolver = Resolver(configure=where.nameserver is None)
    if where.nameserver is not None:
        resolver.nameservers = [where.nameserver]
    resolver.port = where.dns_port
    resolver.timeout = SERVER_S_MAX
    return resolver
