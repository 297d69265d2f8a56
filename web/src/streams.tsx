/** DCP connections: those that get changes of this node, and those by which it receives its copies from others. */

import { ConnectionTable, Window } from "./connections";
import { bytes, duration, many, short, whole } from "./format";
import { type Consumer, type LiveState, onThisNode, type SentTo, stateName, useLive } from "./live";
import { Empty, Lag, Section } from "./pieces";
import { type Column, Table } from "./table";

export function Streams(props: { bucket: string }) {
  const live = useLive();
  return (
    <>
      {live.cluster.nodes.length > 1 && <OfCluster />}
      <Sent bucket={props.bucket} />
      {(live.cluster.nodes.length > 1 || live.consumers.length > 0) && <Received />}
    </>
  );
}

/** All clients of one name, such as the members of a group: each has a connection to every node whose vbuckets it gets. */
interface ClusterConsumer {
  name: string;
  clients: Set<string>;
  streams: number;
  backlog: number;
  messages: number;
  /** What they have still to get of each node that they are connected to. */
  nodes: Map<string, number>;
}

const REPLICATION = "replication:";
/** Our clients add an id of their own, and a number, to the name that they were given. */
const CLIENT_ID = /:([0-9a-f]{12}):\d+$/;

function clusterConsumers(live: LiveState): ClusterConsumer[] {
  const found = new Map<string, ClusterConsumer>();
  const here = live.cluster.nodes.find((node) => node.this)?.name ?? "this node";
  const all: [string, SentTo[]][] = [[here, live.connections]];
  for (const peer of live.peers.values()) if (peer.is_reachable) all.push([peer.name, peer.connections]);
  for (const [node, connections] of all) {
    for (const { name, streams, backlog, messages } of connections) {
      if (name.startsWith(REPLICATION)) continue;
      const group = name.replace(CLIENT_ID, "");
      const one = found.get(group) ?? { name: group, clients: new Set(), streams: 0, backlog: 0, messages: 0, nodes: new Map() };
      one.clients.add(CLIENT_ID.exec(name)?.[1] ?? name);
      one.streams += streams;
      one.backlog += backlog;
      one.messages += messages;
      one.nodes.set(node, (one.nodes.get(node) ?? 0) + backlog);
      found.set(group, one);
    }
  }
  return [...found.values()].sort((one, other) => other.backlog - one.backlog || one.name.localeCompare(other.name));
}

const CLUSTER_COLUMNS: Column<ClusterConsumer>[] = [
  { title: "Consumer", isHead: true, show: (one) => <span class="connection-name">{one.name}</span> },
  { title: "Clients", isNumber: true, show: (one) => whole(one.clients.size) },
  { title: "Streams", isNumber: true, show: (one) => whole(one.streams) },
  { title: "Behind", isNumber: true, show: (one) => <Lag seqnos={one.backlog} /> },
  { title: "Messages", isNumber: true, show: (one) => `${short(one.messages)}/s` },
  {
    title: "Lag, by node",
    show: (one) => (
      <ul class="by-node">
        {[...one.nodes].map(([node, backlog]) => (
          <li key={node}>
            {node} <Lag seqnos={backlog} />
          </li>
        ))}
      </ul>
    ),
  },
];

/** Consumers with what they have still to get of all nodes that answer. */
function OfCluster() {
  const live = useLive();
  const consumers = clusterConsumers(live);
  const silent = [...live.peers.values()].filter((peer) => !peer.is_reachable);
  return (
    <Section
      id="consumers-title"
      title="Consumers and groups, all nodes"
      aside={<span class="muted">clients of one name in one row, the furthest behind first</span>}
    >
      {consumers.length === 0 ? (
        <Empty title="No client is reading this bucket" />
      ) : (
        <Table columns={CLUSTER_COLUMNS} rows={consumers} keyOf={(one) => one.name} marks={(one) => ({ "data-consumer-name": one.name })} />
      )}
      {silent.length > 0 && (
        <p class="problem below">
          Without {silent.map((peer) => peer.name).join(", ")}, which can’t be reached: consumers get none of{" "}
          {silent.length > 1 ? "their" : "its"} changes, and how far they are behind there is unknown.
        </p>
      )}
    </Section>
  );
}

function Sent(props: { bucket: string }) {
  const live = useLive();
  const hidden = live.connection_count - live.connections.length;
  return (
    <Section
      id="connections-title"
      title={`DCP connections${onThisNode(live)}`}
      aside={<span class="muted">{whole(live.connection_count)} open, the furthest behind first</span>}
    >
      {live.connections.length === 0 ? (
        <Empty title="No client is reading this bucket">
          <p>
            Start a consumer, and it appears here within a second, for example <code>headwater tail</code> or{" "}
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
  { title: "Behind", isNumber: true, show: (consumer) => <Lag seqnos={consumer.behind} /> },
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
        <Empty title={copies > 0 ? "No node is sending to the copies here" : "This node keeps no copies"}>
          <p>
            {copies > 0
              ? "The nodes with the active copies do not answer. This node keeps retrying."
              : "A rebalance creates some, if the cluster has replicas."}
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
