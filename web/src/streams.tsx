/** DCP connections: those that get changes of this node, and those by which it receives its copies from others. */

import { ConnectionTable, Window } from "./connections";
import { bytes, duration, many, short, whole } from "./format";
import { type Consumer, onThisNode, stateName, useLive } from "./live";
import { Empty, Section } from "./pieces";
import { type Column, Table } from "./table";

export function Streams(props: { bucket: string }) {
  const live = useLive();
  return (
    <>
      <Sent bucket={props.bucket} />
      {(live.cluster.nodes.length > 1 || live.consumers.length > 0) && <Received />}
    </>
  );
}

function Sent(props: { bucket: string }) {
  const live = useLive();
  const hidden = live.connection_count - live.connections.length;
  return (
    <Section
      id="connections-title"
      title={`DCP connections${onThisNode(live)}`}
      aside={<span class="muted">{whole(live.connection_count)} open, those furthest behind first</span>}
    >
      {live.connections.length === 0 ? (
        <Empty title="No client gets changes of this bucket now">
          <p>
            Start a consumer and it shows up here within a second, for example <code>headwater tail</code> or{" "}
            <code>headwater land</code>.
          </p>
        </Empty>
      ) : (
        <ConnectionTable bucket={props.bucket} connections={live.connections} />
      )}
      {hidden > 0 && <p class="muted below">{whole(hidden)} more connections are not shown.</p>}
    </Section>
  );
}

const CONSUMER_COLUMNS: Column<Consumer>[] = [
  {
    title: "From",
    isHead: true,
    show: (consumer) => (
      <>
        <span class="connection-name">{consumer.peer}</span>
        {consumer.is_proxied && <span class="badge">by a proxy</span>}
        {consumer.is_held && <span class="badge held">held, {bytes(consumer.held_bytes)} wait</span>}
      </>
    ),
  },
  { title: "Vbuckets", isNumber: true, show: (consumer) => whole(consumer.vbuckets) },
  { title: "Behind", isNumber: true, show: (consumer) => whole(consumer.behind) },
  { title: "Changes", isNumber: true, show: (consumer) => `${short(consumer.messages)}/s` },
  { title: "Bytes", isNumber: true, show: (consumer) => `${bytes(consumer.bytes)}/s` },
  { title: "Window", show: (consumer) => <Window unacked={consumer.unacked} size={consumer.window} /> },
  { title: "Open for", isNumber: true, show: (consumer) => duration(consumer.open_s) },
];

function Received() {
  const live = useLive();
  const copies = live.vbuckets.filter((row) => stateName(row.state) === "replica").length;
  const received = live.consumers.reduce((sum, consumer) => sum + consumer.vbuckets, 0);
  return (
    <Section
      id="received-title"
      title="Copies received"
      aside={<span class="muted">{many(copies, "copy", "copies")} on this node, of vbuckets that are active elsewhere</span>}
    >
      {live.consumers.length === 0 ? (
        <Empty title={copies > 0 ? "The copies here come from no node now" : "This node keeps no copies"}>
          <p>
            {copies > 0
              ? "The nodes that have them active do not answer. They are asked again and again."
              : "A rebalance gives it some where the cluster has replicas."}
          </p>
        </Empty>
      ) : (
        <Table
          columns={CONSUMER_COLUMNS}
          rows={live.consumers}
          keyOf={(consumer) => consumer.name}
          marks={(consumer) => ({ "data-consumer": consumer.peer })}
        />
      )}
      {live.consumers.length > 0 && copies > received && (
        <p class="muted below">{many(copies - received, "copy", "copies")} wait for a stream.</p>
      )}
    </Section>
  );
}
