/** What happened, event by event, and on demand the vbuckets of an event and the failover logs. */

import { useState } from "preact/hooks";
import { type Branch, ofBucket } from "./api";
import { many, whole } from "./format";
import { EVENT_NAMES, type NodeEvent, useLive } from "./live";
import { Empty, Events, Problem, Section, StateMark, useAnswer } from "./pieces";
import { type Column, Table } from "./table";

interface EventBranch {
  vbucket: number;
  vbuuid: string;
  /** The last seqno that the vbucket kept. */
  kept: number;
  /** The last one that is known of the history before, or null where nothing is known. */
  known: number | null;
}

interface BranchedVBucket {
  vbucket: number;
  state: string;
  failover_log: Branch[];
}

interface Branched {
  branched: BranchedVBucket[];
  unbranched: number;
}

const SHOWN_MAX = 256;
/** Those that are about branches, and so have vbuckets to show. */
const WITH_BRANCHES = new Set<NodeEvent["kind"]>(["failover", "handover", "restart", "drill", "taken-back"]);

const BRANCH_COLUMNS: Column<EventBranch>[] = [
  { title: "Vbucket", isHead: true, show: (one) => <a href={`#/changes?vbucket=${one.vbucket}`}>{one.vbucket}</a> },
  { title: "Kept up to", isNumber: true, show: (one) => whole(one.kept) },
  { title: "Known up to", isNumber: true, show: (one) => (one.known === null ? "unknown" : whole(one.known)) },
  {
    title: "Lost",
    isNumber: true,
    show: (one) => (one.known === null ? "unknown" : whole(Math.max(0, one.known - one.kept))),
  },
  { title: "New vbuuid", show: (one) => <code>{one.vbuuid}</code> },
];

const LOG_COLUMNS: Column<BranchedVBucket>[] = [
  { title: "Vbucket", isHead: true, show: (one) => one.vbucket },
  { title: "State", show: (one) => <StateMark state={one.state} /> },
  {
    title: "Branches, newest first",
    show: (one) => (
      <ol class="branches">
        {one.failover_log.map((entry) => (
          <li key={entry.vbuuid}>
            <code>{entry.vbuuid}</code> <span class="muted">from {whole(entry.seqno)}</span>
          </li>
        ))}
      </ol>
    ),
  },
];

export function History(props: { bucket: string }) {
  const live = useLive();
  const [kind, setKind] = useState<NodeEvent["kind"] | "">("");
  const kinds = [...new Set(live.events.map((event) => event.kind))].sort();
  const shown = live.events.filter((event) => kind === "" || event.kind === kind);
  return (
    <>
      <Section
        id="events-title"
        title="Events on this node"
        aside={
          <label class="inline-field">
            Show
            <select id="event-kind" value={kind} onChange={(event) => setKind(event.currentTarget.value as typeof kind)}>
              <option value="">all</option>
              {kinds.map((one) => (
                <option key={one} value={one}>
                  {EVENT_NAMES[one]}
                </option>
              ))}
            </select>
          </label>
        }
      >
        <Events
          events={shown}
          max={200}
          below={(event) => WITH_BRANCHES.has(event.kind) && <EventDetails bucket={props.bucket} event={event} />}
        />
      </Section>
      <FailoverLogs bucket={props.bucket} newest={live.events[0]?.number ?? 0} />
    </>
  );
}

/** The vbuckets of an event, those that lost most first; asked for when they are opened. */
function EventDetails(props: { bucket: string; event: NodeEvent }) {
  const [isOpen, setOpen] = useState(false);
  const { event } = props;
  const path = isOpen ? ofBucket(props.bucket, `events/${event.number}`) : null;
  const { answer, error } = useAnswer<{ branches: EventBranch[] }>(path, `${event.lost_changes}/${event.count}`);
  const lost = (one: EventBranch): number => (one.known === null ? 0 : one.known - one.kept);
  const rows = answer?.branches.slice().sort((one, other) => lost(other) - lost(one)) ?? [];
  return (
    <div class="event-details">
      <button class="disclose" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
        Vbuckets and vbuuids
      </button>
      {isOpen && <TakenBack />}
      {isOpen && <Problem error={error} />}
      {isOpen && rows.length > 0 && (
        <Table columns={BRANCH_COLUMNS} rows={rows.slice(0, SHOWN_MAX)} keyOf={(one) => one.vbucket} />
      )}
      {isOpen && rows.length > SHOWN_MAX && <p class="muted">{whole(rows.length - SHOWN_MAX)} more are not shown.</p>}
    </div>
  );
}

/** This node no longer has the changes that were lost; the tables of a landing keep them. */
function TakenBack() {
  const pages = useLive().landings.flatMap((landing) => (landing.page && !landing.error ? [landing.page] : []));
  return (
    <p class="muted">
      A vbucket leads to its changes as they are now. This node no longer has those that were lost
      {pages.length === 0 && ": a landing lists the documents whose changes it took back, in the timeline of its page"}.
      {pages.map((page) => (
        <> <a key={page} href={`${page}#/timeline`}>The documents whose changes the landing undid</a>.</>
      ))}
    </p>
  );
}

function FailoverLogs(props: { bucket: string; newest: number }) {
  const [isOpen, setOpen] = useState(false);
  const { answer, error } = useAnswer<Branched>(isOpen ? ofBucket(props.bucket, "branches") : null, props.newest);
  return (
    <Section
      id="logs-title"
      title="Failover logs"
      aside={
        <button id="show-logs" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
          {isOpen ? "Hide them" : "Show them"}
        </button>
      }
    >
      {!isOpen && <p class="muted">The vbuuids of every vbucket here whose history has branched, and where.</p>}
      {isOpen && <Problem error={error} />}
      {answer && <p class="muted">{many(answer.unbranched, "vbucket")} with one branch</p>}
      {answer && answer.branched.length === 0 && (
        <Empty title="No history has branched">
          <p>
            A vbucket gets a second entry when another copy becomes active, or after a crash. A consumer that has more
            than the new branch has gets the answer to roll back to where it began.
          </p>
        </Empty>
      )}
      {answer && answer.branched.length > 0 && (
        <Table class="logs" columns={LOG_COLUMNS} rows={answer.branched.slice(0, SHOWN_MAX)} keyOf={(one) => one.vbucket} />
      )}
      {answer && answer.branched.length > SHOWN_MAX && (
        <p class="muted">{whole(answer.branched.length - SHOWN_MAX)} more have branched. Select a vbucket on the map for its log.</p>
      )}
    </Section>
  );
}
