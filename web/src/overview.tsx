/** The cluster and its vbuckets as a live map, and what goes through them. */

import { useState } from "preact/hooks";
import { Chart } from "./chart";
import { bytes, clock, duration, many, short, whole } from "./format";
import { useLive } from "./live";
import { MapLegend } from "./map-legend";
import { activeDocuments, furthestCopy, type NodeMap, nodeMaps } from "./node-maps";
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

export function Overview(props: { bucket: string }) {
  const live = useLive();
  const [shade, setShade] = useState(lastShade);
  const [pointed, setPointed] = useState<number | null>(null);
  const [selected, setSelected] = useState<number | null>(null);
  const maps = nodeMaps(live);
  const range = rangeOf(maps.filter((map) => map.knowsNumbers).flatMap((map) => map.rows), shade);
  const { series } = live;

  return (
    <>
      <dl class="tiles">
        <DocumentsTile here={live.documents} maps={maps} />
        <Tile label="Changes in" value={`${short(live.rates.changes ?? 0)}/s`} note={`${whole(live.totals.changes ?? 0)} since start`} />
        <Tile label="DCP out" value={`${short(live.rates.messages ?? 0)}/s`} note={`${bytes(live.rates.sent_bytes ?? 0)}/s`} />
        <Tile label="Backlog" value={short(live.backlog)} note={many(live.connection_count, "connection")} />
        <Tile
          label="Rolled back"
          value={whole(live.rolled_back)}
          note="vbuckets since start"
          tone={live.rolled_back > 0 ? "warn" : undefined}
        />
        <Tile label="On disk" value={bytes(live.disk_bytes)} note={`up ${duration(live.uptime_s)}`} />
      </dl>

      <Section
        id="map-title"
        title={maps.length > 1 ? `Cluster: ${maps.length} nodes` : "Vbuckets"}
        aside={
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
        }
      >
        <MapLegend maps={maps} shade={shade} range={range} />
        <div class="map-layout">
          <div class="maps">
            {maps.map((map) => (
              <div class="map-node" key={map.node.name} data-this={map.isThis} data-heard={map.unheardSinceMs === null}>
                {maps.length > 1 && <MapHead map={map} />}
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
      </Section>

      <Section id="throughput-title" title="Throughput" aside={<span class="muted">the last ten minutes, by the second</span>}>
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

      <Section id="events-title" title="Events" aside={<a href="#/history">failover logs</a>}>
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
      note={missing > 0 ? `without ${many(missing, "node")}` : `${whole(here)} active here`}
      tone={missing > 0 ? "warn" : undefined}
    />
  );
}

function MapHead(props: { map: NodeMap }) {
  const { map } = props;
  const behind = furthestCopy(map);
  return (
    <div class="map-head">
      <h3>
        {map.node.name}
        {map.isThis && <span class="badge">this node</span>}
        {map.isHeld && <span class="badge held">copies held back</span>}
      </h3>
      {map.unheardSinceMs !== null ? (
        <span class="badge gone" title={map.error ?? undefined}>
          unreachable since {clock(map.unheardSinceMs)}
        </span>
      ) : (
        map.knowsNumbers && (
          <span class="muted">
            {many(activeDocuments(map), "document")} active
            {behind !== null && `, copies ${behind === 0 ? "up to date" : `up to ${whole(behind)} behind`}`}
          </span>
        )
      )}
      {!map.isThis && map.node.url && (
        <a href={map.node.url} class="map-link">
          its dashboard
        </a>
      )}
    </div>
  );
}
