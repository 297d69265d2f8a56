/** Requests to the node. What is refused becomes an error whose text is the node's own. */

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

async function failure(response: Response): Promise<ApiError> {
  let message = `The node answered with ${response.status}`;
  try {
    const answer = await response.json();
    if (typeof answer.message === "string") message = answer.message;
  } catch {
    // An answer that is not JSON has nothing to add.
  }
  return new ApiError(response.status, message);
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  const response = await fetch(`/ui/api/${path}`, { signal, credentials: "same-origin" });
  if (!response.ok) throw await failure(response);
  return response.json();
}

export async function post(path: string, body?: unknown): Promise<void> {
  const response = await fetch(`/ui/api/${path}`, {
    method: "POST",
    credentials: "same-origin",
    // A page of another site can't send this header without being asked for leave first.
    headers: { "Content-Type": "application/json", "X-Headwater-Dashboard": "1" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw await failure(response);
}

export function ofBucket(bucket: string, path: string, query: Record<string, string | number | undefined> = {}): string {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== "") search.set(name, String(value));
  }
  const text = search.toString();
  return `buckets/${encodeURIComponent(bucket)}/${path}${text ? `?${text}` : ""}`;
}

export interface Session {
  /** Null where no user is logged in. */
  user: string | null;
  buckets: string[];
  version: string;
}

export interface ChangeRow {
  key: string;
  collection: string;
  seqno: number;
  cas: string;
  time_ms: number;
  revision: number;
  vbucket: number;
  op: "mutation" | "deletion" | "expiration";
  preview: string;
  value_bytes: number;
}

export interface Extent {
  is_complete: boolean;
  searched_bytes: number;
}

export interface ShownDocument {
  key: string;
  collection: string;
  seqno: number;
  cas: string;
  time_ms: number;
  revision: number;
  vbucket: number;
  is_deleted: boolean;
  is_json: boolean;
  value: string;
  value_bytes: number;
  is_cut: boolean;
  xattrs: Record<string, unknown>;
  flags: number;
  expiry_s: number;
}

export interface Branch {
  vbuuid: string;
  seqno: number;
}

export interface VBucketDetails {
  vbucket: number;
  state: string;
  documents: number;
  high_seqno: number;
  durable_seqno: number;
  purge_seqno: number;
  history_start_seqno: number;
  superseded: number;
  lag: number;
  failover_log: Branch[];
}

export interface StreamRow {
  vbucket: number;
  stream_id: number | null;
  state: string;
  start_seqno: number;
  end_seqno: number | null;
  last_sent_seqno: number;
  backlog: number;
  frames: number;
  bytes: number;
}
