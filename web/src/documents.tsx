/** Documents: one by its key, the ones changed last, and the collections there are. */

import { useEffect, useState } from "preact/hooks";
import { type ChangeRow, type Extent, ofBucket, type ShownDocument } from "./api";
import { searchNote, useSettled } from "./changes";
import { bytes, moment, whole } from "./format";
import { useLive } from "./live";
import { CollectionSelect, Empty, Problem, Section, useAnswer } from "./pieces";

function pretty(document: ShownDocument): string {
  if (!document.is_json || document.is_cut) return document.value;
  try {
    return JSON.stringify(JSON.parse(document.value), null, 2);
  } catch {
    return document.value;
  }
}

export function Documents(props: { bucket: string; query: URLSearchParams }) {
  const live = useLive();
  const [collection, setCollection] = useState(props.query.get("collection") ?? "");
  const [key, setKey] = useState(props.query.get("key") ?? "");
  const asked = props.query.get("key");
  const askedCollection = props.query.get("collection") ?? "";
  const settledKey = useSettled(key);

  useEffect(() => {
    if (asked === null) return;
    setKey(asked);
    setCollection(askedCollection);
  }, [asked, askedCollection]);

  const list = useAnswer<{ documents: ChangeRow[] } & Extent>(
    ofBucket(props.bucket, "documents", { collection, key: settledKey, rows: 50 }),
    Math.floor(live.uptime_s / 5),
  );
  const one = useAnswer<ShownDocument>(
    asked === null ? null : ofBucket(props.bucket, "document", { collection: askedCollection, key: asked }),
    live.totals.changes,
  );
  const show = (wanted: string): void => {
    location.hash = `#/documents?collection=${encodeURIComponent(collection)}&key=${encodeURIComponent(wanted)}`;
  };

  return (
    <>
      <Section
        id="documents-title"
        title="Documents"
        aside={
          <span class="muted" role="status">
            {list.answer ? searchNote(list.answer, list.answer.documents.length, "document") : ""}
          </span>
        }
      >
        <form
          class="filters"
          role="search"
          onSubmit={(event) => {
            event.preventDefault();
            if (key) show(key);
          }}
        >
          <div class="field">
            <label for="document-collection">Collection</label>
            <CollectionSelect
              id="document-collection"
              value={collection}
              collections={live.collections}
              all
              onChange={setCollection}
            />
          </div>
          <div class="field grow">
            <label for="document-key">Key, or a part of it</label>
            <input
              id="document-key"
              type="search"
              value={key}
              maxLength={250}
              autocomplete="off"
              spellcheck={false}
              onInput={(event) => setKey(event.currentTarget.value)}
            />
          </div>
          <button type="submit" class="primary" disabled={!key}>
            Open this key
          </button>
        </form>
        <div class="documents-layout">
          <div>
            <Problem error={list.error} />
            {list.answer && list.answer.documents.length === 0 && (
              <Empty title="No document matches">
                <p>The list has the documents that were changed last. A document by its whole key is always found.</p>
              </Empty>
            )}
            {list.answer && list.answer.documents.length > 0 && (
              <ul class="document-list">
                {list.answer.documents.map((row) => (
                  <li key={`${row.vbucket}-${row.key}`}>
                    <a
                      href={`#/documents?collection=${encodeURIComponent(row.collection)}&key=${encodeURIComponent(row.key)}`}
                      aria-current={row.key === asked ? "true" : undefined}
                    >
                      <span class="document-key">{row.key}</span>
                      <span class="muted">{bytes(row.value_bytes)}</span>
                      <span class="document-preview">{row.preview}</span>
                    </a>
                  </li>
                ))}
              </ul>
            )}
          </div>
          <div class="card document" aria-live="polite">
            {asked === null && (
              <Empty title="No document is open">
                <p>Choose one from the list, or write its key and press Enter.</p>
              </Empty>
            )}
            {asked !== null && one.error && (
              <Empty title={one.error}>
                <p>
                  <code>{asked}</code> in {askedCollection || "all collections"}
                </p>
              </Empty>
            )}
            {asked !== null && one.answer && <Document document={one.answer} />}
          </div>
        </div>
      </Section>
      <Section id="collections-title" title="Collections">
        <div class="table-frame">
          <table class="stacked">
            <thead>
              <tr>
                <th scope="col">Scope</th>
                <th scope="col">Collection</th>
                <th scope="col" class="number">Id</th>
                <th scope="col" class="number">Longest life</th>
              </tr>
            </thead>
            <tbody>
              {live.collections.map((one) => (
                <tr key={one.id}>
                  <td data-label="Scope">{one.scope}</td>
                  <th scope="row">{one.name}</th>
                  <td data-label="Id" class="number">0x{one.id}</td>
                  <td data-label="Longest life" class="number">
                    {one.max_ttl_s ? `${whole(one.max_ttl_s)} s` : "no limit"}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </Section>
    </>
  );
}

function Document(props: { document: ShownDocument }) {
  const { document } = props;
  const xattrs = Object.entries(document.xattrs);
  return (
    <>
      <h3 class="document-title">{document.key}</h3>
      {document.is_deleted && <p class="problem">This document was deleted. What is left of it is shown.</p>}
      <dl class="facts wide">
        <dt>collection</dt>
        <dd>{document.collection}</dd>
        <dt>changed</dt>
        <dd>{moment(document.time_ms)}</dd>
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
            <dd>{moment(document.expiry_s * 1000)}</dd>
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
