/** The change browser: changes by collection, key, kind and time, newest first, a page at a time. */

import { useState } from "preact/hooks";
import { type ChangeRow, type Extent, ofBucket } from "./api";
import { dated, whole } from "./format";
import { onThisNode, useLive } from "./live";
import { Empty, Problem, Section, useAnswer } from "./pieces";
import { documentPath, SearchFields, SearchNote, useSettled } from "./search";
import { type Column, Table } from "./table";

const PAGE_ROWS = 50;
const OPS: ChangeRow["op"][] = ["mutation", "deletion", "expiration"];

const COLUMNS: Column<ChangeRow>[] = [
  { title: "Time", class: "nowrap", show: (change) => dated(change.time_ms) },
  { title: "What", show: (change) => <span class={`badge ${change.op}`}>{change.op}</span> },
  {
    title: "Key",
    isHead: true,
    class: "key",
    show: (change) => <a href={documentPath(change.collection, change.key)}>{change.key}</a>,
  },
  { title: "Collection", show: (change) => change.collection },
  { title: "Vbucket", isNumber: true, show: (change) => change.vbucket },
  { title: "Seqno", isNumber: true, show: (change) => whole(change.seqno) },
  {
    title: "Value",
    class: "preview",
    show: (change) => (change.value_bytes === 0 ? <span class="muted">none</span> : change.preview),
  },
];

/** A field of a date and a time, in this browser's zone, as the node takes it. */
const milliseconds = (local: string): number | undefined => (local ? new Date(local).getTime() : undefined);

const cursor = (change: ChangeRow): string => `${change.cas}-${change.vbucket}`;

export function Changes(props: { bucket: string; vbucket: string }) {
  const live = useLive();
  const [collection, setCollection] = useState("");
  const [key, setKey] = useState("");
  const [op, setOp] = useState("");
  const [vbucket, setVBucket] = useState(props.vbucket);
  const [from, setFrom] = useState("");
  const [to, setTo] = useState("");
  const [isFollowing, setFollowing] = useState(true);
  const [pages, setPages] = useState<string[]>([]);
  const settledKey = useSettled(key);
  const before = pages.at(-1);
  const path = ofBucket(props.bucket, "changes", {
    collection, key: settledKey, op, vbucket, from: milliseconds(from), to: milliseconds(to), before, rows: PAGE_ROWS,
  });
  const isLive = isFollowing && before === undefined && to === "" && !document.hidden;
  const { answer, error } = useAnswer<{ changes: ChangeRow[] } & Extent>(path, isLive ? live.totals.changes : "stopped");
  const last = answer?.changes.at(-1);

  /** Another search begins on its first page. */
  const choosing = (set: (value: string) => void) => (value: string): void => {
    set(value);
    setPages([]);
  };

  return (
    <Section
      id="changes-title"
      title={`Changes${onThisNode(live)}`}
      aside={<SearchNote extent={answer} count={answer?.changes.length ?? 0} thing="change" />}
    >
      <SearchFields
        name="change"
        keyLabel="Key contains"
        collection={collection}
        keyPart={key}
        onCollection={choosing(setCollection)}
        onKeyPart={choosing(setKey)}
      >
        <div class="field">
          <label for="change-op">What</label>
          <select id="change-op" value={op} onChange={(event) => choosing(setOp)(event.currentTarget.value)}>
            <option value="">everything</option>
            {OPS.map((name) => (
              <option key={name} value={name}>
                {name}s
              </option>
            ))}
          </select>
        </div>
        <div class="field">
          <label for="change-vbucket">Vbucket</label>
          <input
            id="change-vbucket"
            type="number"
            min="0"
            max={live.vbuckets.length - 1}
            placeholder="all"
            value={vbucket}
            onChange={(event) => choosing(setVBucket)(event.currentTarget.value)}
          />
        </div>
        <TimeField id="change-from" label="From" value={from} onChange={choosing(setFrom)} />
        <TimeField id="change-to" label="Until" value={to} onChange={choosing(setTo)} />
        <label class="switch">
          <input type="checkbox" checked={isFollowing} onChange={(event) => setFollowing(event.currentTarget.checked)} />
          Follow new changes
        </label>
      </SearchFields>
      <Problem error={error} />
      {answer && answer.changes.length === 0 && (
        <NoChange isAsked={[settledKey, collection, op, vbucket, from, to].some(Boolean)} extent={answer} />
      )}
      {answer && answer.changes.length > 0 && (
        <Table
          class="changes"
          columns={COLUMNS}
          rows={answer.changes}
          keyOf={(change) => `${change.vbucket}-${change.seqno}-${change.cas}`}
          marks={(change) => ({ "data-key": change.key })}
        />
      )}
      {(pages.length > 0 || (answer && !answer.is_complete)) && (
        <div class="pages" role="group" aria-label="Pages of changes">
          <button id="newer" disabled={pages.length === 0} onClick={() => setPages(pages.slice(0, -1))}>
            Newer
          </button>
          <span class="muted">Page {pages.length + 1}</span>
          <button
            id="older"
            disabled={!last || answer!.is_complete}
            onClick={() => last && setPages([...pages, cursor(last)])}
          >
            Older
          </button>
        </div>
      )}
    </Section>
  );
}

function TimeField(props: { id: string; label: string; value: string; onChange: (value: string) => void }) {
  return (
    <div class="field">
      <label for={props.id}>{props.label}</label>
      <input
        id={props.id}
        type="datetime-local"
        step="1"
        value={props.value}
        onChange={(event) => props.onChange(event.currentTarget.value)}
      />
    </div>
  );
}

function NoChange(props: { isAsked: boolean; extent: Extent }) {
  if (!props.isAsked) {
    return (
      <Empty title="The bucket has no changes yet">
        <p>Write a document, and it appears here within a second.</p>
      </Empty>
    );
  }
  return (
    <Empty title="No change matches">
      <p>
        {props.extent.is_complete
          ? "All stored changes of this node were searched. In a cluster, other nodes have the rest."
          : "Older changes were not searched, because a search is limited in size and time."}
      </p>
    </Empty>
  );
}
