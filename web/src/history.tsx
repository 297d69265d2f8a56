/** What happened: events, and the failover logs of the vbuckets whose history has branched. */

import { type Branch, ofBucket } from "./api";
import { many, whole } from "./format";
import { useLive } from "./live";
import { Empty, Events, Problem, Section, StateMark, useAnswer } from "./pieces";

interface Branched {
  branched: { vbucket: number; state: string; failover_log: Branch[] }[];
  unbranched: number;
}

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
              than the new branch has is told to roll back to where it began.
            </p>
          </Empty>
        )}
        {answer && answer.branched.length > 0 && (
          <div class="table-frame">
            <table class="stacked">
              <thead>
                <tr>
                  <th scope="col">Vbucket</th>
                  <th scope="col">State</th>
                  <th scope="col">Branches, newest first</th>
                </tr>
              </thead>
              <tbody>
                {answer.branched.slice(0, 256).map((one) => (
                  <tr key={one.vbucket}>
                    <th scope="row">{one.vbucket}</th>
                    <td data-label="State">
                      <StateMark state={one.state} />
                    </td>
                    <td data-label="Branches">
                      <ol class="branches">
                        {one.failover_log.map((entry) => (
                          <li key={entry.vbuuid}>
                            <code>{entry.vbuuid}</code> <span class="muted">from {whole(entry.seqno)}</span>
                          </li>
                        ))}
                      </ol>
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        )}
        {answer && answer.branched.length > 256 && (
          <p class="muted">{whole(answer.branched.length - 256)} more have branched. Select a vbucket on the map for its log.</p>
        )}
      </Section>
    </>
  );
}
