"""TLS of a node: towards those who connect to it, and towards the other nodes of its cluster."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import HeadwaterError
from headwater.node.options import NodeOptions


def server_context(options: NodeOptions) -> ssl.SSLContext | None:
    """None where the node speaks no TLS."""
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _files_that_can_be_used():
        context.load_cert_chain(options.tls_cert, options.tls_key)
    return context


def peer_context(options: NodeOptions) -> ssl.SSLContext | None:
    """The nodes of a cluster speak TLS if one does, and may all have the same certificate: it is trusted, too."""
    if options.tls_cert is None:
        return None
    context = ssl.create_default_context()
    with _files_that_can_be_used():
        context.load_verify_locations(options.tls_cert)
    return context


@contextmanager
def _files_that_can_be_used() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # those of TLS are some
        raise HeadwaterError(
            f"the TLS certificate or key can't be used: {error}", hint="Give PEM files that belong together"
        ) from error
