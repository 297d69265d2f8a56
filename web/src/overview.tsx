/** The cluster and its vbuckets as a live map, and what goes through them. */

import { useMemo, useState } from "preact/hooks";
import { ofBucket, type VBucketDetails } from "./api";
import { Chart } from "./chart";
import { bytes, duration, many, short, whole } from "./format";
import { type ClusterNode, type LiveState, STATES, stateName, useLive, type VBucketRow } from "./live";
import { Events, Problem, Section, StateMark, Tile, useAnswer } from "./pieces";
import { type Range, rangeOf, type Shade, SHADES, VBucketMap } from "./vbucket-map";

const SHADE_NAMES: Record<Shade, string> = {
  documents: "documents",
  lag: "lag of streams",
  seqno: "seqno",
  none: "state only",
};

interface NodeMap {
  node: ClusterNode;
  rows: VBucketRow[];
  isThis: boolean;
}

/** What each node of the cluster has, by the config; of this node what it really has. */
function nodeMaps(live: LiveState): NodeMap[] {
  const { nodes, map } = live.cluster;
  const self: ClusterNode = nodes.find((node) => node.this) ?? { name: "this node", this: true, url: null };
  const here: NodeMap = { node: self, rows: live.vbuckets, isThis: true };
  if (nodes.length < 2) return [here];
  return nodes.map((node, index) => {
    if (node === self) return here;
    const rows = map.map((row) => ({
      state: row[0] === index ? 1 : row.slice(1).includes(index) ? 2 : 0,
      documents: 0,
      seqno: 0,
      lag: 0,
    }));
    return { node, rows, isThis: false };
  });
}

export function Overview(props: { bucket: string }) {
  const live = useLive();
  const [shade, setShade] = useState<Shade>("documents");
  const [pointed, setPointed] = useState<number | null>(null);
  const [selected, setSelected] = useState<number | null>(null);
  const maps = nodeMaps(live);
  const range = rangeOf(live.vbuckets, shade);
  const counts = useMemo(() => {
    const counted = new Map<string, number>();
    for (const row of live.vbuckets) counted.set(stateName(row.state), (counted.get(stateName(row.state)) ?? 0) + 1);
    return counted;
  }, [live.vbuckets, live.uptime_s]);
  const { series } = live;

  return (
    <>
      <dl class="tiles">
        <Tile label="Documents" value={whole(live.documents)} note="in active vbuckets" />
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
            <select value={shade} onChange={(event) => setShade(event.currentTarget.value as Shade)} id="shade">
              {Object.entries(SHADE_NAMES).map(([value, name]) => (
                <option key={value} value={value}>
                  {name}
                </option>
              ))}
            </select>
          </label>
        }
      >
        <Legend counts={counts} shade={shade} range={range} />
        <div class="map-layout">
          <div class={`maps ${maps.length > 1 ? "several" : ""}`}>
            {maps.map(({ node, rows, isThis }) => (
              <div class="map-node" key={node.name} data-this={isThis}>
                {maps.length > 1 && (
                  <h3>
                    {node.name}
                    {isThis ? (
                      <span class="badge">this node</span>
                    ) : (
                      node.url && (
                        <a href={node.url} class="map-link">
                          its dashboard
                        </a>
                      )
                    )}
                  </h3>
                )}
                <VBucketMap
                  label={node.name}
                  rows={rows}
                  shade={shade}
                  range={range}
                  knowsNumbers={isThis}
                  selected={selected}
                  onPoint={setPointed}
                  onSelect={setSelected}
                />
              </div>
            ))}
          </div>
          <Details bucket={props.bucket} pointed={pointed} selected={selected} live={live} />
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

function Legend(props: { counts: Map<string, number>; shade: Shade; range: Range }) {
  return (
    <div class="legend">
      <ul class="legend-states" aria-label="States of the vbuckets on this node">
        {STATES.slice(1)
          .concat("absent")
          .map((state) => (
            <li key={state} data-count={props.counts.get(state) ?? 0} data-legend={state}>
              <StateMark state={state} /> <b>{whole(props.counts.get(state) ?? 0)}</b>
            </li>
          ))}
      </ul>
      {props.shade !== "none" && (
        <div class="legend-scale">
          <span>{short(props.range.least)}</span>
          <span class="scale" aria-hidden="true">
            {Array.from({ length: SHADES }, (_, step) => (
              <i key={step} data-state="active" data-shade={String(step)} />
            ))}
          </span>
          <span>
            {short(props.range.most)} {SHADE_NAMES[props.shade]}
          </span>
        </div>
      )}
    </div>
  );
}

function Details(props: { bucket: string; pointed: number | null; selected: number | null; live: LiveState }) {
  const { live, selected } = props;
  const shown = props.pointed ?? selected;
  const row = shown === null ? undefined : live.vbuckets[shown];
  const copies = shown === null ? undefined : live.cluster.map[shown];
  // The log is asked for where somebody has chosen a vbucket, and again when that vbucket has moved on.
  const asked = selected !== null && selected === shown && row?.state ? selected : null;
  const path = asked === null ? null : ofBucket(props.bucket, `vbuckets/${asked}`);
  const { answer, error } = useAnswer<VBucketDetails>(path, asked === null ? 0 : `${row?.seqno}/${row?.state}`);
  if (shown === null || row === undefined) {
    return (
      <aside class="details card" aria-label="Vbucket">
        <h3>Vbucket</h3>
        <p class="muted">Point at one for its numbers. Select one, by a click or with the keyboard, for its failover log.</p>
      </aside>
    );
  }
  return (
    <aside class="details card" aria-label="Vbucket">
      <h3>
        Vbucket <span data-test="vbucket">{shown}</span>
      </h3>
      <dl class="facts">
        <dt>{live.cluster.nodes.length > 1 ? "state here" : "state"}</dt>
        <dd>
          <StateMark state={stateName(row.state)} />
        </dd>
        <dt>documents</dt>
        <dd>{whole(row.documents)}</dd>
        <dt>durable seqno</dt>
        <dd>{whole(row.seqno)}</dd>
        <dt>lag of streams</dt>
        <dd>{whole(row.lag)}</dd>
        {live.cluster.nodes.length > 1 && copies && (
          <>
            <dt>active on</dt>
            <dd>{live.cluster.nodes[copies[0] ?? -1]?.name ?? "no node"}</dd>
            <dt>copies on</dt>
            <dd>
              {copies
                .slice(1)
                .map((index) => live.cluster.nodes[index]?.name)
                .filter(Boolean)
                .join(", ") || "no node"}
            </dd>
          </>
        )}
      </dl>
      <Problem error={error} />
      {answer && answer.vbucket === shown && (
        <>
          <h4>Failover log</h4>
          <ol class="failover-log">
            {answer.failover_log.map((entry, index) => (
              <li key={entry.vbuuid}>
                <code>{entry.vbuuid}</code> from seqno {whole(entry.seqno)}
                {index === 0 && <span class="badge">now</span>}
              </li>
            ))}
          </ol>
        </>
      )}
    </aside>
  );
}
