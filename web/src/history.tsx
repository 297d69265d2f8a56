/** What happened: events, and the failover logs of the vbuckets whose history has branched. */

import { type Branch, ofBucket } from "./api";
import { many, whole } from "./format";
import { useLive } from "./live";
import { Empty, Events, Problem, Section, StateMark, useAnswer } from "./pieces";
import { type Column, Table } from "./table";

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

const COLUMNS: Column<BranchedVBucket>[] = [
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
  const newest = live.events[0]?.number ?? 0;
  const { answer, error } = useAnswer<Branched>(ofBucket(props.bucket, "branches"), newest);
  return (
    <>
      <Section id="events-title" title="Events" aside={<span class="muted">since the node started, newest first</span>}>
        <Events events={live.events} max={200} />
      </Section>
      <Section
        id="logs-title"
        title="Failover logs"
        aside={answer && <span class="muted">{many(answer.unbranched, "vbucket")} with one branch</span>}
      >
        <Problem error={error} />
        {answer && answer.branched.length === 0 && (
          <Empty title="No history has branched">
            <p>
              A vbucket gets a second entry when another copy becomes active, or after a crash. A consumer that has more
              than the new branch has gets the answer to roll back to where it began.
            </p>
          </Empty>
        )}
        {answer && answer.branched.length > 0 && (
          <Table columns={COLUMNS} rows={answer.branched.slice(0, SHOWN_MAX)} keyOf={(one) => one.vbucket} />
        )}
        {answer && answer.branched.length > SHOWN_MAX && (
          <p class="muted">{whole(answer.branched.length - SHOWN_MAX)} more have branched. Select a vbucket on the map for its log.</p>
        )}
      </Section>
    </>
  );
}
