/** What has happened to the tables, newest first. */

import { useState } from "preact/hooks";
import { bytes, many, moment, whole } from "../src/format";
import { Empty, Section } from "../src/pieces";
import { type Lake, type LakeEvent, type RollbackEvent, span } from "./lake";
import { SampleOf } from "./sample";

const KINDS = { all: "Everything", batch: "Batches", merge: "Merges", rollback: "Rollbacks", upkeep: "Upkeep" } as const;
type Kind = keyof typeof KINDS;
const SHOWN_AT_ONCE = 50;
const CLASSES: Record<LakeEvent["kind"], string> = { batch: "mutation", merge: "branch", rollback: "rollback", upkeep: "" };

export function Timeline(props: { lake: Lake }) {
  const [kind, setKind] = useState<Kind>("all");
  const [shown, setShown] = useState(SHOWN_AT_ONCE);
  const events = props.lake.events.filter((event) => kind === "all" || event.kind === kind);
  const known = props.lake.events.filter((event) => event.kind === "rollback").length;
  return (
    <Section
      id="timeline-title"
      title="Timeline"
      aside={
        <label class="inline-field">
          <span class="sr">Events</span>
          <select id="kind" value={kind} onChange={(event) => setKind(event.currentTarget.value as Kind)}>
            {Object.entries(KINDS).map(([value, name]) => (
              <option key={value} value={value}>
                {name}
              </option>
            ))}
          </select>
        </label>
      }
    >
      <p class="muted timeline-note">
        From the newest entries of the tables’ logs.{" "}
        {props.lake.rollbacks === null
          ? "The number of earlier rollbacks is unknown."
          : `${many(props.lake.rollbacks, "rollback of a vbucket", "rollbacks of vbuckets")} since the beginning; ${many(known, "event")} here.`}
      </p>
      <EventList events={events.slice(0, shown)} />
      {events.length > shown && (
        <button class="below" onClick={() => setShown(shown + SHOWN_AT_ONCE)}>
          Show older events ({whole(events.length - shown)} more)
        </button>
      )}
    </Section>
  );
}

export function EventList(props: { events: LakeEvent[] }) {
  if (props.events.length === 0) {
    return (
      <Empty title="No such events">
        <p>Batches, merges and rollbacks appear here when they are committed.</p>
      </Empty>
    );
  }
  return (
    <ol class="events">
      {props.events.map((event) => (
        <li key={`${event.kind}-${event.time_s}-${"batch" in event ? event.batch : event.table}`} data-kind={event.kind}>
          <time>{moment(event.time_s * 1000)}</time>
          <span class={`badge ${CLASSES[event.kind]}`}>{event.kind}</span>
          <span class="event-text">{event.kind === "rollback" ? <Rollback event={event} /> : sentence(event)}</span>
        </li>
      ))}
    </ol>
  );
}

function sentence(event: Exclude<LakeEvent, RollbackEvent>): string {
  switch (event.kind) {
    case "batch": {
      const rows = event.rows === null ? "an unknown number of rows" : many(event.rows, "row");
      return `Batch ${event.batch}: ${rows}${event.took_s === null ? "" : ` in ${span(event.took_s)}`}`;
    }
    case "merge":
      return `Documents merged up to batch ${event.batch}: ${names(event.tables)}, ${many(event.files, "file")}, ${bytes(event.written_bytes)} written`;
    case "upkeep":
      return `${event.table}: ${many(event.removed, "file")} rewritten as ${event.added}, with the same rows`;
  }
}

const names = (tables: string[]): string => (tables.length <= 3 ? tables.join(", ") : many(tables.length, "table"));

function Rollback(props: { event: RollbackEvent }) {
  const [isOpen, setOpen] = useState(false);
  const { event } = props;
  const undone = event.undone === null ? "an unknown number of changes" : many(event.undone, "change");
  const more = event.vbuckets - event.parts.length;
  return (
    <>
      <button class="disclose" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
        {undone} of {many(event.vbuckets, "vbucket")} undone in batch {event.batch}
      </button>
      <span class="why">{event.why}</span>
      {isOpen && (
        <div class="undone">
          <ul class="undone-parts">
            {event.parts.map((part) => (
              <li key={part.vbucket}>
                vbucket {part.vbucket}: from seqno {whole(part.from_seqno)} back to {whole(part.kept_seqno)},{" "}
                {part.reached_seqno === null ? "read again from 0" : `then read on to ${whole(part.reached_seqno)}`}
              </li>
            ))}
            {more > 0 && <li class="muted">and {many(more, "vbucket")} more</li>}
          </ul>
          <SampleOf path={`undone?batch=${event.batch}`} label={`Documents whose changes batch ${event.batch} undid`} />
        </div>
      )}
    </>
  );
}
