/** What the pages that search have in common: the fields, when to ask, what was searched, and links to documents. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { Extent } from "./api";
import { bytes, many } from "./format";
import { useLive } from "./live";

const TYPING_MS = 250;
const KEY_CHARS_MAX = 250;

/** A value once it has not changed for a moment. */
export function useSettled(value: string): string {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = window.setTimeout(() => setSettled(value), TYPING_MS);
    return () => window.clearTimeout(timer);
  }, [value]);
  return settled;
}

export const documentPath = (collection: string, key: string): string =>
  `#/documents?collection=${encodeURIComponent(collection)}&key=${encodeURIComponent(key)}`;

/** How far a search has looked. */
export function SearchNote(props: { extent: Extent | null; count: number; thing: string }) {
  const { extent, count, thing } = props;
  const searched = extent && bytes(extent.searched_bytes);
  return (
    <span class="muted" role="status">
      {extent &&
        (extent.is_complete
          ? `${many(count, thing)}; everything was searched, ${searched}`
          : `the newest ${many(count, thing)}; searched ${searched}`)}
    </span>
  );
}

interface FieldsProps {
  /** What the ids of the fields begin with. */
  name: string;
  keyLabel: string;
  collection: string;
  keyPart: string;
  onCollection: (collection: string) => void;
  onKeyPart: (keyPart: string) => void;
  onSubmit?: () => void;
  children: ComponentChildren;
}

/** A collection and a part of a key; what else a page has to choose comes behind. */
export function SearchFields(props: FieldsProps) {
  const { name } = props;
  return (
    <form
      class="filters"
      role="search"
      onSubmit={(event) => {
        event.preventDefault();
        props.onSubmit?.();
      }}
    >
      <div class="field">
        <label for={`${name}-collection`}>Collection</label>
        <CollectionSelect id={`${name}-collection`} value={props.collection} onChange={props.onCollection} />
      </div>
      <div class="field grow">
        <label for={`${name}-key`}>{props.keyLabel}</label>
        <input
          id={`${name}-key`}
          type="search"
          value={props.keyPart}
          maxLength={KEY_CHARS_MAX}
          autocomplete="off"
          spellcheck={false}
          onInput={(event) => props.onKeyPart(event.currentTarget.value)}
        />
      </div>
      {props.children}
    </form>
  );
}

function CollectionSelect(props: { id: string; value: string; onChange: (value: string) => void }) {
  const names = useLive().collections.map(({ scope, name }) => `${scope}.${name}`);
  return (
    <select id={props.id} value={props.value} onChange={(event) => props.onChange(event.currentTarget.value)}>
      <option value="">all collections</option>
      {names.map((name) => (
        <option key={name} value={name}>
          {name}
        </option>
      ))}
    </select>
  );
}
