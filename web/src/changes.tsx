/** The change browser: the newest changes, by collection and a part of the key. */

import { useState } from "preact/hooks";
import { type ChangeRow, type Extent, ofBucket } from "./api";
import { moment, whole } from "./format";
import { useLive } from "./live";
import { Empty, Problem, Section, useAnswer } from "./pieces";
import { documentPath, SearchFields, SearchNote, useSettled } from "./search";
import { type Column, Table } from "./table";

const COLUMNS: Column<ChangeRow>[] = [
  { title: "Time", class: "nowrap", show: (change) => moment(change.time_ms) },
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

export function Changes(props: { bucket: string }) {
  const live = useLive();
  const [collection, setCollection] = useState("");
  const [key, setKey] = useState("");
  const [isFollowing, setFollowing] = useState(true);
  const settledKey = useSettled(key);
  const path = ofBucket(props.bucket, "changes", { collection, key: settledKey, rows: 50 });
  const { answer, error } = useAnswer<{ changes: ChangeRow[] } & Extent>(
    path,
    isFollowing && !document.hidden ? live.totals.changes : "stopped",
  );
  return (
    <Section
      id="changes-title"
      title="Changes"
      aside={<SearchNote extent={answer} count={answer?.changes.length ?? 0} thing="change" />}
    >
      <SearchFields
        name="change"
        keyLabel="Key contains"
        collection={collection}
        keyPart={key}
        onCollection={setCollection}
        onKeyPart={setKey}
      >
        <label class="switch">
          <input type="checkbox" checked={isFollowing} onChange={(event) => setFollowing(event.currentTarget.checked)} />
          Follow new changes
        </label>
      </SearchFields>
      <Problem error={error} />
      {answer && answer.changes.length === 0 && <NoChange isAsked={settledKey !== "" || collection !== ""} extent={answer} />}
      {answer && answer.changes.length > 0 && (
        <Table
          class="changes"
          columns={COLUMNS}
          rows={answer.changes}
          keyOf={(change) => `${change.vbucket}-${change.seqno}-${change.cas}`}
          marks={(change) => ({ "data-key": change.key })}
        />
      )}
    </Section>
  );
}

function NoChange(props: { isAsked: boolean; extent: Extent }) {
  if (!props.isAsked) {
    return (
      <Empty title="The bucket has no changes yet">
        <p>Write a document, and it shows up here within a second.</p>
      </Empty>
    );
  }
  return (
    <Empty title="No change matches">
      <p>
        {props.extent.is_complete
          ? "Everything that is stored here was searched. In a cluster, other nodes have the rest."
          : "Older changes were not searched: the search has its bounds."}
      </p>
    </Empty>
  );
}
