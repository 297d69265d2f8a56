/** The change browser: the newest changes, by collection and a part of the key. */

import { useEffect, useState } from "preact/hooks";
import { type ChangeRow, type Extent, ofBucket } from "./api";
import { bytes, many, moment, whole } from "./format";
import { useLive } from "./live";
import { CollectionSelect, Empty, Problem, Section, useAnswer } from "./pieces";

const TYPING_MS = 250;

export function useSettled(value: string): string {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = window.setTimeout(() => setSettled(value), TYPING_MS);
    return () => window.clearTimeout(timer);
  }, [value]);
  return settled;
}

export function searchNote(extent: Extent, count: number, thing: string): string {
  if (extent.is_complete) return `${many(count, thing)}; everything was searched, ${bytes(extent.searched_bytes)}`;
  return `the newest ${many(count, thing)}; searched ${bytes(extent.searched_bytes)}`;
}

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
      aside={
        <span class="muted" role="status">
          {answer ? searchNote(answer, answer.changes.length, "change") : ""}
        </span>
      }
    >
      <form class="filters" onSubmit={(event) => event.preventDefault()} role="search">
        <div class="field">
          <label for="change-collection">Collection</label>
          <CollectionSelect
            id="change-collection"
            value={collection}
            collections={live.collections}
            all
            onChange={setCollection}
          />
        </div>
        <div class="field grow">
          <label for="change-key">Key contains</label>
          <input
            id="change-key"
            type="search"
            value={key}
            maxLength={250}
            autocomplete="off"
            spellcheck={false}
            onInput={(event) => setKey(event.currentTarget.value)}
          />
        </div>
        <label class="switch">
          <input type="checkbox" checked={isFollowing} onChange={(event) => setFollowing(event.currentTarget.checked)} />
          Follow new changes
        </label>
      </form>
      <Problem error={error} />
      {answer && answer.changes.length === 0 && (
        <Empty title={settledKey || collection ? "No change matches" : "The bucket has no changes yet"}>
          <p>
            {settledKey || collection
              ? answer.is_complete
                ? "Everything that is stored here was searched. In a cluster, other nodes have the rest."
                : "Older changes were not searched: the search has its bounds."
              : "Write a document, and it shows up here within a second."}
          </p>
        </Empty>
      )}
      {answer && answer.changes.length > 0 && (
        <div class="table-frame">
          <table class="stacked changes">
            <thead>
              <tr>
                <th scope="col">Time</th>
                <th scope="col">What</th>
                <th scope="col">Key</th>
                <th scope="col">Collection</th>
                <th scope="col" class="number">Vbucket</th>
                <th scope="col" class="number">Seqno</th>
                <th scope="col">Value</th>
              </tr>
            </thead>
            <tbody>
              {answer.changes.map((change) => (
                <tr key={`${change.vbucket}-${change.seqno}-${change.cas}`} data-key={change.key}>
                  <td data-label="Time" class="nowrap">{moment(change.time_ms)}</td>
                  <td data-label="What">
                    <span class={`badge ${change.op}`}>{change.op}</span>
                  </td>
                  <th scope="row" class="key">
                    <a href={`#/documents?collection=${encodeURIComponent(change.collection)}&key=${encodeURIComponent(change.key)}`}>
                      {change.key}
                    </a>
                  </th>
                  <td data-label="Collection">{change.collection}</td>
                  <td data-label="Vbucket" class="number">{change.vbucket}</td>
                  <td data-label="Seqno" class="number">{whole(change.seqno)}</td>
                  <td data-label="Value" class="preview">
                    {change.value_bytes === 0 ? <span class="muted">none</span> : change.preview}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Section>
  );
}
