"""What a consumer asks of its producer before the first stream."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.protocol.messages.dcp_connection import Control


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    buffer_bytes: int = 10 * 1024 * 1024
    """What the producer may send before it has to wait for acknowledgements."""
    noop_interval_s: int = 20
    consumer_name: str = ""
    """The name under which the producer counts this copy's acknowledgements of durable writes; none without it."""

    def controls(self) -> list[Control]:
        """The control messages, in the order they are sent.

        With all of them granted, changes come as they are stored. A producer may refuse any: what comes then is brought
        into that form, and where a snapshot tells no history, rollbacks into it are not exact.
        """
        values = {
            "enable_noop": "true",
            "set_noop_interval": str(self.noop_interval_s),
            "connection_buffer_size": str(self.buffer_bytes),
            "enable_expiry_opcode": "true",
            "v7_dcp_status_codes": "true",
            "flatbuffers_system_events": "true",
            "change_streams": "true",
            "max_marker_version": "2.2",
        }
        if self.consumer_name:
            values |= {"enable_sync_writes": "true", "consumer_name": self.consumer_name}
        return [Control(key=key.encode(), value=value.encode()) for key, value in values.items()]
