/** What each node of the cluster has: of this one what it knows, of the others what they have answered. */

import { BEHIND_SEQNOS } from "./format";
import { type ClusterNode, type LiveState, stateName, type VBucketRow } from "./live";

export interface NodeMap {
  node: ClusterNode;
  rows: VBucketRow[];
  isThis: boolean;
  /** Whether the node ever gave its numbers. Where not, the rows have the states that the config says. */
  knowsNumbers: boolean;
  /** Since when the node is not heard, or null where it answers. */
  unheardSinceMs: number | null;
  error: string | null;
  /** Whether its copies are let fall behind, for a drill. */
  isHeld: boolean;
}

const NO_NUMBERS = { documents: 0, seqno: 0, lag: -1 };

export const isCopy = (row: VBucketRow): boolean => stateName(row.state) === "replica" || stateName(row.state) === "pending";

export const isHeldBack = (map: NodeMap, row: VBucketRow): boolean => map.isHeld && isCopy(row);

export function nodeMaps(live: LiveState): NodeMap[] {
  const { nodes } = live.cluster;
  const self: ClusterNode = nodes.find((node) => node.this) ?? { name: "this node", this: true, url: null };
  const here: NodeMap = {
    node: self,
    rows: live.vbuckets,
    isThis: true,
    knowsNumbers: true,
    unheardSinceMs: null,
    error: null,
    isHeld: live.is_held,
  };
  if (nodes.length < 2) return [here];
  return nodes.map((node, index) => (node === self ? here : otherNode(live, node, index)));
}

function otherNode(live: LiveState, node: ClusterNode, index: number): NodeMap {
  const peer = live.peers.get(node.name);
  const knowsNumbers = peer?.is_known ?? false;
  const byConfig = statesByConfig(live.cluster.map, index);
  const said = knowsNumbers ? peer!.vbuckets : byConfig;
  // Of a node that can't be reached the config decides what it has, for the others and for the line of health.
  const isReachable = peer?.is_reachable ?? true;
  return {
    node,
    rows: isReachable ? said : byConfig.map(({ state }, vbucket) => ({ ...said[vbucket]!, state })),
    isThis: false,
    knowsNumbers,
    // As the line of health judges it.
    unheardSinceMs: peer && !isReachable ? peer.heard_ms : null,
    error: peer?.error ?? null,
    isHeld: peer?.is_held ?? false,
  };
}

const statesByConfig = (map: number[][], index: number): VBucketRow[] =>
  map.map((row) => ({ state: row[0] === index ? 1 : row.slice(1).includes(index) ? 2 : 0, ...NO_NUMBERS }));

/** What a vbucket of a node is worth: its state, as far as the node can be reached and the copy is known. */
export const STANDINGS = {
  active: "active",
  replica: "copy",
  behind: "copy that is behind",
  unknown: "copy of which nothing is known",
  lost: "active, can’t be reached",
  pending: "pending",
  dead: "dead",
  absent: "not on the node",
} as const;
export type Standing = keyof typeof STANDINGS;

export function standing(map: NodeMap, row: VBucketRow): Standing {
  const state = stateName(row.state);
  if (map.unheardSinceMs !== null && state !== "absent") return state === "active" ? "lost" : "unknown";
  if (state !== "replica" || !map.knowsNumbers) return state;
  if (row.lag < 0) return "unknown";
  return row.lag > (map.isHeld ? 0 : BEHIND_SEQNOS) ? "behind" : "replica";
}

/** How many vbuckets of some nodes stand how, in the order in which they are shown. */
export function standings(maps: NodeMap[]): [Standing, number][] {
  const counts = new Map<Standing, number>();
  for (const map of maps) {
    for (const row of map.rows) {
      const found = standing(map, row);
      counts.set(found, (counts.get(found) ?? 0) + 1);
    }
  }
  return (Object.keys(STANDINGS) as Standing[]).flatMap((one) => (counts.has(one) ? [[one, counts.get(one)!]] : []));
}

/** The documents of the active vbuckets of a node. */
export const activeDocuments = (map: NodeMap): number =>
  map.rows.reduce((sum, row) => (stateName(row.state) === "active" ? sum + row.documents : sum), 0);

/** How far the copy of a node is behind that is furthest behind; null where it has none that one knows of. */
export function furthestCopy(map: NodeMap): number | null {
  const lags = map.rows.filter((row) => isCopy(row) && row.lag >= 0).map((row) => row.lag);
  return lags.length === 0 ? null : Math.max(...lags);
}
