/** DCP connections in a table, each of which can be opened for its streams. */

import { useState } from "preact/hooks";
import { ofBucket, type StreamRow } from "./api";
import { bytes, duration, short, whole } from "./format";
import { type Connection, useLive } from "./live";
import { Lag, Problem, useAnswer } from "./pieces";
import { type Column, Table } from "./table";

const STREAMS_SHOWN_MAX = 24;
const ASK_EVERY_S = 3;

export function ConnectionTable(props: { bucket: string; connections: Connection[] }) {
  const [opened, setOpened] = useState<string | null>(null);
  const name: Column<Connection> = {
    title: "Connection",
    isHead: true,
    show: (connection) => (
      <>
        <button
          class="disclose"
          aria-expanded={opened === connection.name}
          onClick={() => setOpened(opened === connection.name ? null : connection.name)}
        >
          <span class="connection-name">{connection.name}</span>
        </button>
        {connection.noop_wait && <span class="badge">noop sent</span>}
      </>
    ),
  };
  return (
    <Table
      columns={[name, ...NUMBERS]}
      rows={props.connections}
      keyOf={(connection) => connection.name}
      marks={(connection) => ({ "data-connection": connection.name })}
      below={(connection) =>
        opened === connection.name && <Streams bucket={props.bucket} connection={connection.name} />
      }
    />
  );
}

const NUMBERS: Column<Connection>[] = [
  { title: "Streams", isNumber: true, show: (connection) => whole(connection.streams) },
  { title: "Behind", isNumber: true, show: (connection) => <Lag seqnos={connection.backlog} /> },
  { title: "Messages", isNumber: true, show: (connection) => `${short(connection.messages)}/s` },
  { title: "Bytes", isNumber: true, show: (connection) => `${bytes(connection.bytes)}/s` },
  { title: "Window", show: (connection) => <Window unacked={connection.unacked} size={connection.window} /> },
  { title: "Open for", isNumber: true, show: (connection) => duration(connection.open_s) },
];

/** How much of a flow-control window is in use. */
export function Window(props: { unacked: number; size: number }) {
  const { unacked, size } = props;
  if (size === 0) return <span class="muted">no flow control</span>;
  const share = Math.min(1, unacked / size);
  return (
    <span class="window">
      <span class="bar" aria-hidden="true">
        <i class={share > 0.9 ? "full" : ""} style={{ width: `${share * 100}%` }} />
      </span>
      <span class="window-text">
        {bytes(unacked)} of {bytes(size)}
      </span>
    </span>
  );
}

function Streams(props: { bucket: string; connection: string }) {
  const path = ofBucket(props.bucket, "streams", { connection: props.connection });
  // Not at every tick: a connection may have a thousand streams.
  const turn = Math.floor(useLive().uptime_s / ASK_EVERY_S);
  const { answer, error } = useAnswer<{ streams: StreamRow[]; count: number }>(path, turn);
  if (error) return <Problem error={error} />;
  if (answer === null) return <p class="muted">Asking…</p>;
  if (answer.streams.length === 0) return <p class="muted">It has no open streams.</p>;
  const shown = answer.streams.slice(0, STREAMS_SHOWN_MAX);
  return (
    <table class="streams">
      <caption>
        {whole(answer.count)} streams{answer.count > shown.length ? `, the ${shown.length} furthest behind` : ""}
      </caption>
      <thead>
        <tr>
          <th scope="col" class="number">Vbucket</th>
          <th scope="col">State</th>
          <th scope="col" class="number">Sent up to</th>
          <th scope="col" class="number">Backlog</th>
          <th scope="col" class="number">Messages</th>
          <th scope="col" class="number">Bytes</th>
        </tr>
      </thead>
      <tbody>
        {shown.map((stream) => (
          <tr key={`${stream.vbucket}-${stream.stream_id}`}>
            <td class="number">{stream.vbucket}</td>
            <td>{stream.state}</td>
            <td class="number">{whole(stream.last_sent_seqno)}</td>
            <td class="number">{whole(stream.backlog)}</td>
            <td class="number">{whole(stream.frames)}</td>
            <td class="number">{bytes(stream.bytes)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
