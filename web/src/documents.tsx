/** Documents: one by its key, the ones changed last, and the collections there are. */

import { useEffect, useRef, useState } from "preact/hooks";
import { type ChangeRow, type Extent, ofBucket, type ShownDocument } from "./api";
import { bytes, dated, many, short, whole } from "./format";
import { type Collection, onThisNode, useLive } from "./live";
import { Empty, Problem, Section, useAnswer } from "./pieces";
import { documentPath, SearchFields, SearchNote, useSettled } from "./search";
import { type Column, Table } from "./table";

const VERSIONS_MAX = 50;

function pretty(document: ShownDocument): string {
  if (!document.is_json || document.is_cut) return document.value;
  try {
    return JSON.stringify(JSON.parse(document.value), null, 2);
  } catch {
    return document.value;
  }
}

/** How many documents each collection has, by its id, in a part of the vbuckets. */
interface Counted {
  documents: Record<string, number>;
  share: number;
}

/** What a part of the vbuckets has says about what all have: keys are spread evenly over them. */
function documentsOf(counted: Counted | null, id: string): string {
  if (counted === null || counted.share === 0) return "not counted";
  const found = counted.documents[id] ?? 0;
  return counted.share === 1 ? whole(found) : `about ${short(Math.round(found / counted.share))}`;
}

const COLLECTION_COLUMNS: Column<Collection>[] = [
  { title: "Scope", show: (one) => one.scope },
  { title: "Collection", isHead: true, show: (one) => one.name },
  { title: "Id", isNumber: true, show: (one) => `0x${one.id}` },
  { title: "Longest life", isNumber: true, show: (one) => (one.max_ttl_s ? `${whole(one.max_ttl_s)} s` : "no limit") },
];

export function Documents(props: { bucket: string; query: URLSearchParams }) {
  const live = useLive();
  const [collection, setCollection] = useState("");
  const [key, setKey] = useState("");
  const card = useRef<HTMLDivElement>(null);
  const asked = props.query.get("key");
  const askedCollection = props.query.get("collection") ?? "";
  const settledKey = useSettled(key);

  // On a narrow screen it lies above the list that it was chosen from.
  useEffect(() => {
    if (asked !== null) card.current?.scrollIntoView({ block: "nearest" });
  }, [asked, askedCollection]);

  const list = useAnswer<{ documents: ChangeRow[] } & Extent>(
    ofBucket(props.bucket, "documents", { collection, key: settledKey, rows: 50 }),
    Math.floor(live.uptime_s / 5),
  );
  const counted = useAnswer<Counted>(ofBucket(props.bucket, "collections"), Math.floor(live.uptime_s / 10));

  return (
    <>
      <Section
        id="documents-title"
        title={`Documents${onThisNode(live)}`}
        aside={<SearchNote extent={list.answer} count={list.answer?.documents.length ?? 0} thing="document" />}
      >
        <SearchFields
          name="document"
          keyLabel="Key, or part of it"
          collection={collection}
          keyPart={key}
          onCollection={setCollection}
          onKeyPart={setKey}
          onSubmit={() => {
            if (key) location.hash = documentPath(collection, key);
          }}
        >
          <button type="submit" class="primary" disabled={!key}>
            Open this key
          </button>
        </SearchFields>
        <div class="documents-layout">
          <div>
            <Problem error={list.error} />
            {list.answer && (
              <DocumentList
                documents={list.answer.documents}
                opened={asked}
                isAsked={settledKey !== "" || collection !== ""}
              />
            )}
          </div>
          <div ref={card} class={`card document ${asked === null ? "" : "opened"}`} aria-live="polite">
            <Opened bucket={props.bucket} collection={askedCollection} documentKey={asked} changes={live.totals.changes ?? 0} />
          </div>
        </div>
      </Section>
      <Section
        id="collections-title"
        title="Collections"
        aside={
          <span class="muted">
            {counted.answer && counted.answer.share < 1
              ? `counted in ${Math.max(1, Math.floor(counted.answer.share * 100))} % of the vbuckets, in one second`
              : `documents${onThisNode(live)}, counted every ten seconds`}
          </span>
        }
      >
        <Problem error={counted.error} />
        <Table
          columns={[
            ...COLLECTION_COLUMNS,
            { title: "Documents", isNumber: true, show: (one) => documentsOf(counted.answer, one.id) },
          ]}
          rows={live.collections}
          keyOf={(one) => one.id}
          marks={(one) => ({ "data-collection": `${one.scope}.${one.name}` })}
        />
      </Section>
    </>
  );
}

function DocumentList(props: { documents: ChangeRow[]; opened: string | null; isAsked: boolean }) {
  if (props.documents.length === 0) {
    return props.isAsked ? (
      <Empty title="No document matches">
        <p>The list has the most recently changed documents. To find any document, enter its whole key.</p>
      </Empty>
    ) : (
      <Empty title="There are no documents yet">
        <p>Write one, and it appears here within seconds.</p>
      </Empty>
    );
  }
  return (
    <ul class="document-list">
      {props.documents.map((row) => (
        <li key={`${row.vbucket}-${row.collection}-${row.key}`}>
          <a href={documentPath(row.collection, row.key)} aria-current={row.key === props.opened ? "true" : undefined}>
            <span class="document-key">{row.key}</span>
            <span class="muted">
              <span class="document-collection">{row.collection}</span> · {bytes(row.value_bytes)}
            </span>
            <span class="document-preview">{row.preview}</span>
          </a>
        </li>
      ))}
    </ul>
  );
}

function Opened(props: { bucket: string; collection: string; documentKey: string | null; changes: number }) {
  const { bucket, collection, documentKey } = props;
  const { answer, error } = useAnswer<ShownDocument>(
    documentKey === null ? null : ofBucket(bucket, "document", { collection, key: documentKey }),
    props.changes,
  );
  if (documentKey === null) {
    return (
      <Empty title="No document is open">
        <p>Choose one from the list, or enter its key and press Enter.</p>
      </Empty>
    );
  }
  if (error) {
    return (
      <Empty title={error}>
        <p>
          <code>{documentKey}</code> in {collection || "all collections"}
        </p>
      </Empty>
    );
  }
  return (
    answer && (
      <>
        <Document document={answer} />
        <Versions bucket={bucket} document={answer} />
      </>
    )
  );
}

const VERSION_COLUMNS: Column<ChangeRow>[] = [
  { title: "Time", class: "nowrap", isHead: true, show: (one) => dated(one.time_ms) },
  { title: "What", show: (one) => <span class={`badge ${one.op}`}>{one.op}</span> },
  { title: "Seqno", isNumber: true, show: (one) => whole(one.seqno) },
  {
    title: "Value",
    class: "preview",
    show: (one) => (one.value_bytes === 0 ? <span class="muted">none</span> : one.preview),
  },
];

/** The versions that are stored, newest first. Older ones live as long as the history window. */
function Versions(props: { bucket: string; document: ShownDocument }) {
  const { key, collection, seqno } = props.document;
  const path = ofBucket(props.bucket, "versions", { key, collection, rows: VERSIONS_MAX });
  const { answer, error } = useAnswer<{ versions: ChangeRow[] } & Extent>(path, seqno);
  return (
    <>
      <h4>Versions</h4>
      <Problem error={error} />
      {answer && answer.versions.length > 0 && (
        <Table class="changes versions" columns={VERSION_COLUMNS} rows={answer.versions} keyOf={(one) => one.seqno} />
      )}
      {answer && <p class="muted">{many(answer.versions.length, "version")} stored. Older versions are removed when the history window ends.</p>}
    </>
  );
}

function Document(props: { document: ShownDocument }) {
  const { document } = props;
  const xattrs = Object.entries(document.xattrs);
  return (
    <>
      <h3 class="document-title">{document.key}</h3>
      {document.is_deleted && <p class="problem">This document was deleted. The page shows what is still stored.</p>}
      <dl class="facts wide">
        <dt>collection</dt>
        <dd>{document.collection}</dd>
        <dt>changed</dt>
        <dd>{dated(document.time_ms)}</dd>
        <dt>vbucket, seqno</dt>
        <dd>
          {document.vbucket}, {whole(document.seqno)}
        </dd>
        <dt>revision</dt>
        <dd>{whole(document.revision)}</dd>
        <dt>CAS</dt>
        <dd>
          <code>{document.cas}</code>
        </dd>
        <dt>size</dt>
        <dd>{bytes(document.value_bytes)}</dd>
        {document.expiry_s > 0 && (
          <>
            <dt>expires</dt>
            <dd>{dated(document.expiry_s * 1000)}</dd>
          </>
        )}
      </dl>
      {document.value && (
        <pre class="value" tabIndex={0} aria-label="Value">
          {pretty(document)}
        </pre>
      )}
      {document.is_cut && <p class="muted">Only the beginning is shown.</p>}
      {xattrs.length > 0 && (
        <>
          <h4>Extended attributes</h4>
          <pre class="value" tabIndex={0} aria-label="Extended attributes">
            {JSON.stringify(document.xattrs, null, 2)}
          </pre>
        </>
      )}
    </>
  );
}
