/** What is of the whole cluster, then what is of this node: a strip a node, the full map on demand, and throughput. */

import { useState } from "preact/hooks";
import { Chart } from "./chart";
import { bytes, duration, many, short, whole } from "./format";
import { type Copies, type Losses, useLive } from "./live";
import { MapLegend } from "./map-legend";
import { activeDocuments, type NodeMap, nodeMaps } from "./node-maps";
import { NodeHead, NodeStrips } from "./node-strip";
import { Events, Section, Tile } from "./pieces";
import { VBucketDetails } from "./vbucket-details";
import { rangeOf, type Shade, VBucketMap } from "./vbucket-map";

const SHADE_NAMES: Record<Shade, string> = {
  documents: "documents",
  lag: "lag",
  seqno: "seqno",
  none: "state only",
};

/** Kept for those who look at another page in between. */
let lastShade: Shade = "documents";
let lastMapOpen = false;

export function Overview(props: { bucket: string }) {
  const live = useLive();
  const [isMapOpen, setMapOpen] = useState(lastMapOpen);
  const maps = nodeMaps(live);
  const { series } = live;

  // Before the node has said anything a number would be made up.
  if (live.health === null) return null;
  const { copies } = live.health;

  return (
    <>
      <Section
        id="cluster-title"
        title={maps.length > 1 ? `Cluster: ${maps.length} nodes` : "Bucket"}
        aside={
          <button
            id="show-map"
            aria-expanded={isMapOpen}
            onClick={() => {
              lastMapOpen = !isMapOpen;
              setMapOpen(lastMapOpen);
            }}
          >
            {isMapOpen ? "Hide the map of vbuckets" : "Show the map of vbuckets"}
          </button>
        }
      >
        <dl class="tiles">
          <DocumentsTile here={live.documents} maps={maps} />
          {maps.length > 1 && <NodesTile maps={maps} />}
          {copies && maps.length > 1 && <ServedTile copies={copies} />}
          {copies && copies.replicas_wanted > 0 && <ReplicasTile copies={copies} />}
          <Tile label="Collections" value={whole(live.collections.length)} />
        </dl>
        {isMapOpen ? <FullMap bucket={props.bucket} maps={maps} /> : <NodeStrips maps={maps} />}
      </Section>

      <Section
        id="node-title"
        title="This node"
        aside={<span class="muted">up {duration(live.uptime_s)}</span>}
      >
        <dl class="tiles">
          <Tile
            label="Changes written here"
            value={whole(live.totals.changes ?? 0)}
            note={`since it started; ${short(live.rates.changes ?? 0)}/s now`}
          />
          <Tile
            label="System events"
            value={whole(live.totals.system_events ?? 0)}
            note="of collections, by vbucket"
          />
          {maps.length > 1 && <Tile label="Received for copies" value={whole(live.totals.received ?? 0)} note="seqnos since start" />}
          <Tile label="DCP out" value={`${short(live.rates.messages ?? 0)}/s`} note={`${bytes(live.rates.sent_bytes ?? 0)}/s`} />
          <Tile label="Backlog" value={short(live.backlog)} note={many(live.connection_count, "connection")} />
          <LossTile losses={live.losses} />
          <Tile label="On disk" value={bytes(live.disk_bytes)} />
        </dl>
      </Section>

      <Section id="throughput-title" title="Throughput of this node" aside={<span class="muted">the last ten minutes, by the second</span>}>
        <div class="charts">
          <Chart
            title="Changes/s"
            times={series.time_ms}
            format={short}
            lines={[
              { label: "in", values: series.changes, color: "--series-1" },
              { label: "out by DCP", values: series.messages, color: "--series-2" },
            ]}
          />
          <Chart
            title="DCP bytes/s out"
            times={series.time_ms}
            format={bytes}
            lines={[{ label: "sent", values: series.sent_bytes, color: "--series-3" }]}
          />
          <Chart
            title="Backlog of all streams"
            times={series.time_ms}
            format={short}
            lines={[{ label: "seqnos", values: series.backlog, color: "--series-4" }]}
          />
        </div>
      </Section>

      <Section id="events-title" title="Events on this node" aside={<a href="#/history">all, with failover logs</a>}>
        <Events events={live.events} max={6} />
      </Section>
    </>
  );
}

/** Of the whole cluster, as far as its nodes answer. */
function DocumentsTile(props: { here: number; maps: NodeMap[] }) {
  const { here, maps } = props;
  if (maps.length === 1) return <Tile label="Documents" value={whole(here)} note="in active vbuckets" />;
  const heard = maps.filter((map) => map.unheardSinceMs === null);
  const elsewhere = heard.filter((map) => !map.isThis).reduce((sum, map) => sum + activeDocuments(map), 0);
  const missing = maps.length - heard.length;
  return (
    <Tile
      label="Documents, all nodes"
      value={whole(here + elsewhere)}
      note={missing > 0 ? `without those of ${many(missing, "unreachable node")}` : `${whole(here)} active here`}
      tone={missing > 0 ? "warn" : undefined}
    />
  );
}

function NodesTile(props: { maps: NodeMap[] }) {
  const answering = props.maps.filter((map) => map.unheardSinceMs === null).length;
  const isWhole = answering === props.maps.length;
  return (
    <Tile label="Nodes that answer" value={`${answering} of ${props.maps.length}`} tone={isWhole ? undefined : "warn"} />
  );
}

/** The vbuckets whose documents can be read and written. */
function ServedTile(props: { copies: Copies }) {
  const { vbuckets, active, active_unreachable, active_missing } = props.copies;
  const notes = [
    active_unreachable > 0 && `${whole(active_unreachable)} can’t be reached`,
    active_missing > 0 && `${whole(active_missing)} on no node`,
  ].filter(Boolean);
  return (
    <Tile
      label="Vbuckets served"
      value={`${whole(active)} of ${whole(vbuckets)}`}
      note={notes.join(", ") || "by nodes that answer"}
      tone={notes.length > 0 ? "warn" : undefined}
    />
  );
}

function ReplicasTile(props: { copies: Copies }) {
  const { replicas_wanted, replicas, replicas_unknown, replicas_missing } = props.copies;
  const notes = [
    replicas_unknown > 0 && `${whole(replicas_unknown)} unknown`,
    replicas_missing > 0 && `${whole(replicas_missing)} missing`,
  ].filter(Boolean);
  return (
    <Tile
      label="Replicas on nodes that answer"
      value={`${whole(replicas)} of ${whole(replicas_wanted)}`}
      note={notes.join(", ") || "none missing"}
      tone={notes.length > 0 ? "warn" : undefined}
    />
  );
}

/** What failovers, crashes and drills on this node have lost: a number that is known, or that it is not. */
function LossTile(props: { losses: Losses }) {
  const { lost_changes, lost_vbuckets, answers, unknown } = props.losses;
  const value = lost_changes > 0 ? whole(lost_changes) : unknown > 0 ? "unknown" : "none known";
  const notes = [
    lost_vbuckets > 0 && `in ${many(lost_vbuckets, "vbucket")}`,
    lost_changes > 0 && unknown > 0 && `${whole(unknown)} unknown`,
    `consumers rolled back ${many(answers, "time")}`,
  ];
  return (
    <Tile
      label="Lost changes"
      value={value}
      note={notes.filter(Boolean).join(", ")}
      tone={lost_changes > 0 || unknown > 0 ? "warn" : undefined}
    />
  );
}

/** Every vbucket of every node, with its numbers. */
function FullMap(props: { bucket: string; maps: NodeMap[] }) {
  const { maps } = props;
  const [shade, setShade] = useState(lastShade);
  const [pointed, setPointed] = useState<number | null>(null);
  const [selected, setSelected] = useState<number | null>(null);
  const range = rangeOf(maps.filter((map) => map.knowsNumbers).flatMap((map) => map.rows), shade);
  return (
    <div class="full-map">
      <label class="inline-field">
        Shade by
        <select
          id="shade"
          value={shade}
          onChange={(event) => {
            lastShade = event.currentTarget.value as Shade;
            setShade(lastShade);
          }}
        >
          {Object.entries(SHADE_NAMES).map(([value, name]) => (
            <option key={value} value={value}>
              {name}
            </option>
          ))}
        </select>
      </label>
      <MapLegend maps={maps} shade={shade} range={range} />
      <div class="map-layout">
        <div class="maps">
          {maps.map((map) => (
            <div class="map-node" key={map.node.name} data-this={map.isThis} data-heard={map.unheardSinceMs === null}>
              {maps.length > 1 && <NodeHead map={map} />}
              <VBucketMap
                map={map}
                shade={shade}
                range={range}
                selected={selected}
                onPoint={setPointed}
                onSelect={(vbucket) => setSelected(vbucket === selected ? null : vbucket)}
              />
            </div>
          ))}
        </div>
        <VBucketDetails
          bucket={props.bucket}
          maps={maps}
          pointed={pointed}
          selected={selected}
          onClose={() => setSelected(null)}
        />
      </div>
    </div>
  );
}
