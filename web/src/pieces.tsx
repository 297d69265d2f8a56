/** Small pieces that several pages are made of. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { ApiError, getJson } from "./api";
import { lagTone, many, moment, whole } from "./format";
import { EVENT_NAMES, type NodeEvent } from "./live";
import { applyTheme, chosenTheme, type Theme } from "./theme";

export function Section(props: { title: string; aside?: ComponentChildren; children: ComponentChildren; id?: string }) {
  return (
    <section class="section" aria-labelledby={props.id}>
      <header class="section-head">
        <h2 id={props.id}>{props.title}</h2>
        {props.aside}
      </header>
      {props.children}
    </section>
  );
}

export function Empty(props: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <p class="empty-title">{props.title}</p>
      {props.children}
    </div>
  );
}

export function Tile(props: { label: string; value: string; note?: string; tone?: "warn" }) {
  return (
    <div class={`tile ${props.tone ?? ""}`}>
      <dt>{props.label}</dt>
      <dd>
        {props.value}
        {props.note && <span class="tile-note">{props.note}</span>}
      </dd>
    </div>
  );
}

export function StateMark(props: { state: string; isHeld?: boolean; name?: string }) {
  return (
    <span class="state-mark">
      <i data-state={props.state} data-shade="4" data-held={props.isHeld ? "true" : undefined} />
      {props.name ?? props.state}
      {props.isHeld && !props.name && ", held back"}
    </span>
  );
}

export function Problem(props: { error: string | null }) {
  return props.error ? (
    <p class="problem" role="alert">
      {props.error}
    </p>
  ) : null;
}

/** A number of seqnos, coloured where that many are a reason to look. */
export function Lag(props: { seqnos: number }) {
  return <span class={`lag ${lagTone(props.seqnos)}`}>{whole(props.seqnos)}</span>;
}

/** Numbers in order, with those that follow each other as one: 3, 7–9. */
function ranges(numbers: number[]): string {
  const found: [first: number, last: number][] = [];
  for (const number of numbers) {
    const open = found.at(-1);
    if (open && number === open[1] + 1) open[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

function eventVBuckets(event: NodeEvent): string {
  if (event.vbuckets.length === 0) return "";
  if (event.count === 1) return `vbucket ${event.vbuckets[0]}`;
  const more = event.count - event.vbuckets.length;
  return `${many(event.count, "vbucket")}: ${ranges(event.vbuckets)}${more > 0 ? ` and ${more} more` : ""}`;
}

export function Events(props: { events: NodeEvent[]; max: number; below?: (event: NodeEvent) => ComponentChildren }) {
  if (props.events.length === 0) {
    return (
      <Empty title="Nothing has happened yet">
        <p>Failovers, rollbacks, takeovers, and nodes that join or leave appear here. They survive restarts.</p>
      </Empty>
    );
  }
  return (
    <ol class="events">
      {props.events.slice(0, props.max).map((event) => (
        <li key={event.number} data-kind={event.kind}>
          <time>{moment(event.time_ms)}</time>
          <span class={`badge ${event.kind}`}>{EVENT_NAMES[event.kind]}</span>
          <span class="event-text">
            {event.text} <span class="muted">{eventVBuckets(event)}</span>
            {props.below?.(event)}
          </span>
        </li>
      ))}
    </ol>
  );
}

/** A sentence with `commands` in it, which stand in a face of their own. */
export function Prose(props: { text: string }) {
  return <>{props.text.split("`").map((part, index) => (index % 2 === 1 ? <code key={index}>{part}</code> : part))}</>;
}

/** What a path answers, asked again when the path or `again` changes; the last answer stays while that is under way. */
export function useAnswer<T>(
  path: string | null,
  again: unknown = 0,
  silent = "The node does not answer",
): { answer: T | null; error: string | null } {
  const [loaded, setLoaded] = useState<{ answer: T | null; error: string | null; path: string | null }>({
    answer: null,
    error: null,
    path: null,
  });
  useEffect(() => {
    if (path === null) return;
    const abort = new AbortController();
    getJson<T>(path, abort.signal).then(
      (answer) => setLoaded({ answer, error: null, path }),
      (error: unknown) => {
        if (abort.signal.aborted) return;
        setLoaded({ answer: null, error: error instanceof ApiError ? error.message : silent, path });
      },
    );
    return () => abort.abort();
  }, [path, again]);
  return path === null ? { answer: null, error: null } : loaded;
}

const THEMES: Record<Theme, string> = { auto: "Auto", light: "Light", dark: "Dark" };

export function ThemeSwitch() {
  const [theme, setTheme] = useState<Theme>(chosenTheme());
  return (
    <label class="inline-field">
      <span class="tool-label">Theme</span>
      <select
        id="theme"
        value={theme}
        onChange={(event) => {
          const chosen = event.currentTarget.value as Theme;
          setTheme(chosen);
          applyTheme(chosen);
        }}
      >
        {Object.entries(THEMES).map(([value, name]) => (
          <option key={value} value={value}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}
