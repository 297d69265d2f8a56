/** What the live feed has sent: one event source, one state, and listeners for its changes. */

import { useEffect, useState } from "preact/hooks";
import { getJson, ofBucket, type Session } from "./api";

export const STATES = ["absent", "active", "replica", "pending", "dead"] as const;
export type StateName = (typeof STATES)[number];

export interface VBucketRow {
  state: number;
  documents: number;
  seqno: number;
  /** Of a copy, behind the active one; of others, of the stream furthest behind. Negative where it is not known. */
  lag: number;
}

export interface Connection {
  name: string;
  type: string;
  open_s: number;
  streams: number;
  backlog: number;
  messages: number;
  bytes: number;
  sent_bytes: number;
  unacked: number;
  window: number;
  noop_wait: boolean;
}

/** A connection by which this node receives copies from another one. */
export interface Consumer {
  name: string;
  peer: string;
  is_proxied: boolean;
  open_s: number;
  vbuckets: number;
  behind: number;
  messages: number;
  bytes: number;
  unacked: number;
  window: number;
  is_held: boolean;
  held_bytes: number;
}

/** What a connection of any node gets. */
export interface SentTo {
  name: string;
  streams: number;
  backlog: number;
  messages: number;
}

/** Another node of the cluster, as this node hears of it. */
export interface Peer {
  name: string;
  /** When it was last heard; of one that never was, when it was first asked. */
  heard_ms: number;
  /** Why it does not answer, or null where it does. */
  error: string | null;
  is_known: boolean;
  /** False once it has missed more than one answer. */
  is_reachable: boolean;
  is_held: boolean;
  connections: SentTo[];
  vbuckets: VBucketRow[];
}

export const EVENT_NAMES = {
  failover: "failover",
  handover: "takeover",
  restart: "restart",
  drill: "drill",
  "taken-back": "taken back",
  flush: "flush",
  "answered-rollback": "rollback answered",
  state: "state",
  node: "node",
} as const;

/** Something that happened on this node. It is sent again when more is learned of it. */
export interface NodeEvent {
  number: number;
  time_ms: number;
  kind: keyof typeof EVENT_NAMES;
  text: string;
  vbuckets: number[];
  count: number;
  lost_changes: number;
  lost_vbuckets: number;
  unknown_vbuckets: number;
  answers: number;
}

/** What was lost on this node since its bucket was made. */
export interface Losses {
  lost_changes: number;
  lost_vbuckets: number;
  answers: number;
  /** Vbuckets that were promoted without it being known what they lost. */
  unknown: number;
}

export interface Finding {
  check: string;
  level: "bad" | "warn" | "ok";
  text: string;
  do: string;
  page: string;
}

/** Where the copies of all vbuckets are, judged by the nodes that can be reached. */
export interface Copies {
  vbuckets: number;
  active: number;
  active_unreachable: number;
  active_missing: number;
  replicas_wanted: number;
  replicas: number;
  replicas_unknown: number;
  replicas_missing: number;
}

export interface Health {
  level: Finding["level"];
  text: string;
  do: string;
  findings: Finding[];
  /** Null where the bucket is not in a cluster. */
  copies: Copies | null;
}

export interface ClusterNode {
  name: string;
  this: boolean;
  url: string | null;
}

export interface Collection {
  scope: string;
  name: string;
  id: string;
  max_ttl_s: number | null;
}

export interface Landing {
  url: string;
  /** Null where it has never answered. */
  heard_ms: number | null;
  error?: string;
  /** Nothing listens there any more. */
  is_ended?: boolean;
  /** What it said last. */
  numbers?: Record<string, number>;
  /** Its own page. */
  page?: string;
}

type RowSent = [vbucket: number, state: number, documents: number, seqno: number, lag: number];
type PeerSent = Omit<Peer, "vbuckets"> & { vbuckets: RowSent[] };

type Series = Record<"time_ms" | "changes" | "requests" | "messages" | "sent_bytes" | "backlog", number[]>;

interface Message {
  point: Series;
  history?: Series;
  uptime_s: number;
  version?: string;
  vbucket_count?: number;
  totals: Record<string, number>;
  rates: Record<string, number>;
  documents: number;
  disk_bytes: number;
  pending: number;
  vbuckets: RowSent[];
  is_held: boolean;
  peers: PeerSent[];
  connection_count: number;
  connections: Connection[];
  consumers: Consumer[];
  backlog: number;
  losses: Losses;
  health: Health;
  events: NodeEvent[];
  landings: Landing[];
  landings_watched: number;
  cluster?: { revision: number; nodes: ClusterNode[]; map: number[][]; replicas: number };
  collections?: Collection[];
}

const POINTS_MAX = 600;
const EVENTS_MAX = 200;

const emptySeries = (): Series => ({ time_ms: [], changes: [], requests: [], messages: [], sent_bytes: [], backlog: [] });

const emptyState = () => ({
  status: "connecting" as "connecting" | "live" | "lost",
  /** When the node answered last, by this browser's clock. */
  heard_ms: 0,
  version: "",
  uptime_s: 0,
  totals: {} as Record<string, number>,
  rates: {} as Record<string, number>,
  documents: 0,
  disk_bytes: 0,
  pending: 0,
  vbuckets: [] as VBucketRow[],
  is_held: false,
  peers: new Map<string, Peer>(),
  connections: [] as Connection[],
  consumers: [] as Consumer[],
  connection_count: 0,
  backlog: 0,
  losses: { lost_changes: 0, lost_vbuckets: 0, answers: 0, unknown: 0 } as Losses,
  health: null as Health | null,
  series: emptySeries(),
  events: [] as NodeEvent[],
  landings: [] as Landing[],
  /** The addresses that the node asks for landings, of any bucket. */
  landings_watched: 0,
  /** The lag of each landing over time, since the page was opened. */
  landing_lags: new Map<string, { time_ms: number[]; lag: number[] }>(),
  cluster: { revision: 0, nodes: [] as ClusterNode[], map: [] as number[][], replicas: 0 },
  collections: [] as Collection[],
});

export type LiveState = ReturnType<typeof emptyState>;

export const live: { state: LiveState } = { state: emptyState() };
const listeners = new Set<() => void>();
let source: EventSource | null = null;

function changed(): void {
  for (const listener of listeners) listener();
}

function append(series: number[], more: number[]): void {
  series.push(...more);
  if (series.length > POINTS_MAX) series.splice(0, series.length - POINTS_MAX);
}

function take(message: Message, isFirst: boolean): void {
  if (isFirst) live.state = { ...emptyState(), landing_lags: live.state.landing_lags };
  const state = live.state;
  state.status = "live";
  state.heard_ms = Date.now();
  const points = isFirst && message.history ? message.history : message.point;
  for (const name of Object.keys(state.series) as (keyof Series)[]) append(state.series[name], points[name]);
  if (message.version) state.version = message.version;
  takeRows(state.vbuckets, message.vbuckets);
  takePeers(state, message.peers);
  const { uptime_s, totals, rates, documents, disk_bytes, pending, is_held, backlog, losses, health, landings } = message;
  const { landings_watched, connections, connection_count, consumers } = message;
  Object.assign(state, { uptime_s, totals, rates, documents, disk_bytes, pending, is_held, backlog, losses, health, landings });
  Object.assign(state, { landings_watched, connections, connection_count, consumers });
  takeEvents(state, message.events);
  if (message.cluster) state.cluster = message.cluster;
  if (message.collections) state.collections = message.collections;
  noteLandings(state, message.point.time_ms[0] ?? Date.now());
  changed();
}

function takeRows(rows: VBucketRow[], sent: RowSent[]): void {
  for (const [vbucket, state, documents, seqno, lag] of sent) rows[vbucket] = { state, documents, seqno, lag };
}

/** Newest first; an event that is known takes the place of what was known of it. */
function takeEvents(state: LiveState, sent: NodeEvent[]): void {
  if (sent.length === 0) return;
  const byNumber = new Map([...state.events, ...sent].map((event) => [event.number, event]));
  state.events = [...byNumber.values()].sort((one, other) => other.number - one.number).slice(0, EVENTS_MAX);
}

/** Of a node that was there before, only what has changed is sent. */
function takePeers(state: LiveState, sent: PeerSent[]): void {
  const known = state.peers;
  state.peers = new Map();
  for (const peer of sent) {
    const vbuckets = known.get(peer.name)?.vbuckets ?? [];
    takeRows(vbuckets, peer.vbuckets);
    state.peers.set(peer.name, { ...peer, vbuckets });
  }
}

function noteLandings(state: LiveState, timeMs: number): void {
  for (const landing of state.landings) {
    const lag = landing.numbers?.lag_seqnos;
    // What it said last is no news.
    if (lag === undefined || landing.error) continue;
    const known = state.landing_lags.get(landing.url) ?? { time_ms: [], lag: [] };
    append(known.time_ms, [timeMs]);
    append(known.lag, [lag]);
    state.landing_lags.set(landing.url, known);
  }
}

/** Follow a bucket. `onLoggedOut` is called where the node says that the session has ended. */
export function follow(bucket: string, onLoggedOut: () => void): () => void {
  live.state = emptyState();
  changed();
  let retry: number | undefined;

  const open = (): void => {
    const opened = new EventSource(`/ui/api/${ofBucket(bucket, "live")}`);
    source = opened;
    opened.addEventListener("hello", (event) => take(JSON.parse(event.data), true));
    opened.addEventListener("tick", (event) => take(JSON.parse(event.data), false));
    opened.addEventListener("bye", () => {
      opened.close();
      onLoggedOut();
    });
    opened.onerror = () => {
      live.state.status = "lost";
      changed();
      // A browser tries again by itself unless the node has answered with an error.
      if (opened.readyState === EventSource.CLOSED) {
        retry = window.setTimeout(() => void checkAndOpen(), 2000);
      }
    };
  };

  const checkAndOpen = async (): Promise<void> => {
    try {
      const session = await getJson<Session>("session");
      if (session.user === null) onLoggedOut();
      else open();
    } catch {
      retry = window.setTimeout(() => void checkAndOpen(), 2000);
    }
  };

  open();
  return () => {
    window.clearTimeout(retry);
    source?.close();
    source = null;
  };
}

/** The state of now, and a new look at it whenever it changes. */
export function useLive(): LiveState {
  const [, setCount] = useState(0);
  useEffect(() => {
    const listener = (): void => setCount((count) => count + 1);
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }, []);
  return live.state;
}

/** What a title ends with where other nodes have more of it. */
export const onThisNode = (state: LiveState): string => (state.cluster.nodes.length > 1 ? " on this node" : "");

export const stateName = (state: number): StateName => STATES[state] ?? "absent";
