/** What the server says of a lake, asked for again and again. Null is for what is not known. */

import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";
import { ApiError, getJson } from "../src/api";
import { duration, moment } from "../src/format";

export interface Session {
  needs_token: boolean;
  is_in: boolean;
  version: string;
  /** The names of the pipelines whose lakes are shown; none where it is one lake. */
  pipelines: string[];
}

/** What is known of a pipeline without a look at its tables. */
export interface PipelineRow {
  name: string;
  uri: string;
  state: Landing["state"];
  source?: string;
  failure?: string | null;
  failures?: number | null;
  lag_s?: number | null;
  documents_age_s?: number | null;
  documents?: number | null;
}

/** The pipeline whose lake is shown; empty where there is one lake. */
export const Pipeline = createContext("");

/** A path of the API, for the lake that is shown. */
export function useLakePath(): (path: string) => string {
  const pipeline = useContext(Pipeline);
  return (path) => (pipeline ? `${path}${path.includes("?") ? "&" : "?"}pipeline=${encodeURIComponent(pipeline)}` : path);
}

/** Links to the views of the lake that is shown. */
export function useLinks(): (page: string) => string {
  const pipeline = useContext(Pipeline);
  return (page) => (pipeline ? `#/${encodeURIComponent(pipeline)}/${page}` : `#/${page}`);
}

export interface LakeTable {
  kind: "changes" | "documents" | "history" | "rejects";
  name: string;
  rows: number;
  size_bytes: number;
  files: number;
  columns: [name: string, type: string][];
  typed: string | null;
  batch: number;
  changed_s: number | null;
  pending: number | null;
}

export interface VBucketRollback {
  vbucket: number;
  from_seqno: number;
  kept_seqno: number;
  /** After the batch; null where the vbucket is read again from 0. */
  reached_seqno: number | null;
  is_new_branch: boolean;
}

export interface BatchEvent {
  kind: "batch";
  time_s: number;
  batch: number;
  rows: number | null;
  took_s: number | null;
}

export interface RollbackEvent {
  kind: "rollback";
  time_s: number;
  batch: number;
  vbuckets: number;
  undone: number | null;
  why: string;
  parts: VBucketRollback[];
}

export interface MergeEvent {
  kind: "merge";
  time_s: number;
  batch: number;
  tables: string[];
  files: number;
  written_bytes: number;
}

export interface UpkeepEvent {
  kind: "upkeep";
  time_s: number;
  table: string;
  added: number;
  removed: number;
}

export type LakeEvent = BatchEvent | RollbackEvent | MergeEvent | UpkeepEvent;

export interface Verdict {
  time_s: number;
  is_equal: boolean;
  sentence: string;
  landed: number;
  pending: number;
  differing: number;
  compared: string;
  findings: string[];
}

export interface Lake {
  bucket_uuid: string;
  vbuckets: number;
  selection: string;
  batch: number;
  rows: number | null;
  rollbacks: number | null;
  documents: number;
  collections: number;
  rows_per_s: number | null;
  tables: LakeTable[];
  tables_more: number;
  /** How old what is said of the tables is. */
  looked_ago_s: number;
  events: LakeEvent[];
  verdict: Verdict | null;
}

export interface Landing {
  state: "starting" | "running" | "stopped" | "failed" | "silent" | "unknown";
  lag_s: number | null;
  documents_age_s: number | null;
  /** The times are of what the tables say; the bucket may have nothing newer. */
  is_bound: boolean;
  time_s?: number;
  started_s?: number;
  source?: string;
  bucket?: string;
  host?: string;
  every_s?: number | null;
  failure?: string | null;
  page?: string | null;
  node_page?: string | null;
  status?: {
    doing: string;
    lag_seqnos: number | null;
    failures: number;
    last_merge_s: number | null;
    /** Landings of earlier versions do not say these. */
    failure?: string | null;
    live_bytes?: number | null;
    dead_bytes?: number | null;
    tables_set_aside?: number;
    pending?: number | null;
    advice?: string | null;
    catalog_failure?: string | null;
    set_aside?: { name: string; reason: string; hint: string }[];
  };
}

export interface State {
  now_ms: number;
  uri: string;
  problem: string | null;
  landing: Landing;
  lake: Lake | null;
  lags: { time_ms: number[]; lag_s: number[]; age_s: number[] };
}

export interface Sample {
  columns: string[];
  rows: (string | null)[][];
  of: string;
}

const ASK_EVERY_MS = 2000;

/** Whether the page's server answers, and when it did last. */
export interface Heard {
  is: "connecting" | "live" | "lost";
  at_ms: number | null;
}

/** What the server answers now; the last answer stays while there is none. */
export function useAgain<T>(path: string, onLoggedOut: () => void): { state: T | null; heard: Heard } {
  const [state, setState] = useState<T | null>(null);
  const [heard, setHeard] = useState<Heard>({ is: "connecting", at_ms: null });
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    const ask = async (): Promise<void> => {
      try {
        setState(await getJson<T>(path, abort.signal));
        setHeard({ is: "live", at_ms: Date.now() });
      } catch (thrown) {
        if (abort.signal.aborted) return;
        if (thrown instanceof ApiError && thrown.status === 401) return onLoggedOut();
        setHeard(({ at_ms }) => ({ is: "lost", at_ms }));
      }
      timer = window.setTimeout(() => void ask(), ASK_EVERY_MS);
    };
    void ask();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [path, onLoggedOut]);
  return { state, heard };
}

/** The time of day; of what was never heard, that it was not. */
export const at = (time_ms: number | null | undefined): string =>
  time_ms === null || time_ms === undefined ? "an unknown time" : moment(time_ms);

/** What is said where the page's server is silent: it may be the landing's own process. */
export const serverLost = (heard: Heard): string =>
  `The server of this page has not answered since ${at(heard.at_ms)}. If it was a landing, the landing has ended. The page shows its last answer.`;

/** A time that has passed, short ones to the tenth of a second. */
export function span(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds < 0.05) return "0 s";
  return seconds < 60 ? `${seconds.toFixed(1)} s` : duration(seconds);
}
