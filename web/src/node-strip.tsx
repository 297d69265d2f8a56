/** The vbuckets of each node in a strip, by how they stand, and what its colours stand for. */

import { clock, many, whole } from "./format";
import { activeDocuments, furthestCopy, type NodeMap, type Standing, STANDINGS, standings } from "./node-maps";

export function NodeStrips(props: { maps: NodeMap[] }) {
  const { maps } = props;
  return (
    <div class="strips">
      {maps.map((map) => (
        <div class="map-node" key={map.node.name} data-this={map.isThis} data-heard={map.unheardSinceMs === null}>
          <NodeHead map={map} />
          <Strip map={map} />
        </div>
      ))}
      <ul class="legend-states" aria-label={maps.length > 1 ? "Vbuckets of all nodes, by condition" : "Vbuckets, by state"}>
        {standings(maps).map(([one, count]) => (
          <li key={one} data-standing={one} data-count={count}>
            <i class="segment" data-standing={one} /> {STANDINGS[one]} <b>{whole(count)}</b>
          </li>
        ))}
      </ul>
    </div>
  );
}

function Strip(props: { map: NodeMap }) {
  const { map } = props;
  const found = standings([map]);
  const words = found.map(([one, count]) => `${whole(count)} ${STANDINGS[one]}`).join(", ");
  return (
    <div class="strip" role="img" aria-label={`Vbuckets of ${map.node.name}: ${words}`}>
      {found.map(([one, count]) => (
        <i key={one} class="segment" data-standing={one} style={{ flexGrow: count }} title={`${whole(count)} ${STANDINGS[one]}`} />
      ))}
    </div>
  );
}

/** A node's name, how it is, and what it has. */
export function NodeHead(props: { map: NodeMap }) {
  const { map } = props;
  return (
    <div class="map-head">
      <h3>
        {map.node.name}
        {map.isThis && map.node.name !== "this node" && <span class="badge">this node</span>}
        {map.isHeld && <span class="badge held">copies held back</span>}
      </h3>
      {map.unheardSinceMs !== null && (
        <span class="badge gone" title={map.error ?? undefined}>
          unreachable since {clock(map.unheardSinceMs)}
        </span>
      )}
      {(map.knowsNumbers || map.unheardSinceMs !== null) && <span class="muted">{contents(map)}</span>}
      {!map.isThis && map.node.url && (
        <a href={map.node.url} class="map-link">
          its dashboard
        </a>
      )}
    </div>
  );
}

function contents(map: NodeMap): string {
  const counts = new Map(standings([map]));
  const count = (...names: Standing[]): number => names.reduce((sum, name) => sum + (counts.get(name) ?? 0), 0);
  const unknown = count("unknown");
  if (map.unheardSinceMs !== null) {
    return `${many(count("lost"), "active vbucket")} can’t be read or written, ${many(unknown, "copy", "copies")} unknown`;
  }
  const known = count("replica", "behind", "pending");
  const behind = furthestCopy(map);
  const copies = known > 0 ? `, ${many(known, "copy", "copies")} ${behind ? `up to ${whole(behind)} behind` : "up to date"}` : "";
  const notKnown = unknown > 0 ? `, ${many(unknown, "copy", "copies")} unknown` : "";
  return `${many(activeDocuments(map), "document")} active, ${many(count("active"), "active vbucket")}${copies}${notKnown}`;
}
