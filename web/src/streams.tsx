/** DCP connections: rates, backlog and flow control, and the streams of one. */

import { useState } from "preact/hooks";
import { ofBucket, type StreamRow } from "./api";
import { bytes, duration, short, whole } from "./format";
import { type Connection, useLive } from "./live";
import { Empty, Problem, Section, useAnswer } from "./pieces";

export function Streams(props: { bucket: string }) {
  const live = useLive();
  const [open, setOpen] = useState<string | null>(null);
  const hidden = live.connection_count - live.connections.length;
  return (
    <Section
      id="connections-title"
      title="DCP connections"
      aside={<span class="muted">{whole(live.connection_count)} open, those furthest behind first</span>}
    >
      {live.connections.length === 0 ? (
        <Empty title="Nobody gets changes of this bucket now">
          <p>
            Start a consumer and it shows up here within a second, for example <code>headwater tail</code> or{" "}
            <code>headwater land</code>.
          </p>
        </Empty>
      ) : (
        <div class="table-frame">
          <table class="stacked">
            <thead>
              <tr>
                <th scope="col">Connection</th>
                <th scope="col" class="number">Streams</th>
                <th scope="col" class="number">Backlog</th>
                <th scope="col" class="number">Messages</th>
                <th scope="col" class="number">Bytes</th>
                <th scope="col">Flow-control window</th>
                <th scope="col" class="number">Open for</th>
              </tr>
            </thead>
            <tbody>
              {live.connections.map((connection) => (
                <Row
                  key={connection.name}
                  bucket={props.bucket}
                  connection={connection}
                  isOpen={open === connection.name}
                  onToggle={() => setOpen(open === connection.name ? null : connection.name)}
                  tick={live.uptime_s}
                />
              ))}
            </tbody>
          </table>
        </div>
      )}
      {hidden > 0 && <p class="muted">{whole(hidden)} more connections are not shown.</p>}
    </Section>
  );
}

function Row(props: { bucket: string; connection: Connection; isOpen: boolean; onToggle: () => void; tick: number }) {
  const { connection, isOpen } = props;
  return (
    <>
      <tr data-connection={connection.name}>
        <th scope="row">
          <button class="disclose" aria-expanded={isOpen} onClick={props.onToggle}>
            <span class="connection-name">{connection.name}</span>
          </button>
          {connection.noop_wait && <span class="badge">noop sent</span>}
        </th>
        <td class="number" data-label="Streams">{whole(connection.streams)}</td>
        <td class="number" data-label="Backlog">{whole(connection.backlog)}</td>
        <td class="number" data-label="Messages">{short(connection.messages)}/s</td>
        <td class="number" data-label="Bytes">{bytes(connection.bytes)}/s</td>
        <td data-label="Window">
          <Window connection={connection} />
        </td>
        <td class="number" data-label="Open for">{duration(connection.open_s)}</td>
      </tr>
      {isOpen && (
        <tr class="inner">
          <td colSpan={7}>
            <StreamTable bucket={props.bucket} name={connection.name} tick={props.tick} />
          </td>
        </tr>
      )}
    </>
  );
}

function Window(props: { connection: Connection }) {
  const { unacked, window: size } = props.connection;
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

function StreamTable(props: { bucket: string; name: string; tick: number }) {
  const path = ofBucket(props.bucket, "streams", { connection: props.name });
  // Every few seconds: a connection may have a thousand streams.
  const { answer, error } = useAnswer<{ streams: StreamRow[]; count: number }>(path, Math.floor(props.tick / 3));
  if (error) return <Problem error={error} />;
  if (answer === null) return <p class="muted">Asking…</p>;
  if (answer.streams.length === 0) return <p class="muted">It has no stream open now.</p>;
  const shown = answer.streams.slice(0, 24);
  return (
    <>
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
    </>
  );
}
