/** The landing pipeline: how far the tables are behind the bucket. */

import { Chart } from "./chart";
import { ConnectionTable } from "./connections";
import { many, moment, short, whole } from "./format";
import { type Landing as LandingNumbers, useLive } from "./live";
import { Empty, Section, Tile } from "./pieces";

const isPipeline = (name: string): boolean => /spark|land/i.test(name);

export function Landing(props: { bucket: string }) {
  const live = useLive();
  const connections = live.connections.filter((connection) => isPipeline(connection.name));
  return (
    <>
      <Section id="landing-title" title="Landing into tables">
        {live.landings.length === 0 && (
          <Empty title="No landing is being watched">
            <p>Let the landing have a page of its own, and give the node the address of its metrics:</p>
            <pre class="value">
              {`headwater land … --ui 8080\nheadwater serve … --landing-metrics http://127.0.0.1:8080/metrics`}
            </pre>
            <p>
              A lake at rest is shown by <code>headwater ui DIR</code>.
            </p>
          </Empty>
        )}
        {live.landings.map((landing) => (
          <One key={landing.url} landing={landing} lags={live.landing_lags.get(landing.url)} />
        ))}
      </Section>
      <Section
        id="pipeline-title"
        title="Its DCP connections"
        aside={<span class="muted">those with “spark” or “land” in their name</span>}
      >
        {connections.length === 0 ? (
          <Empty title="None is open now">
            <p>A landing connects for each batch, so between two batches there may be none.</p>
          </Empty>
        ) : (
          <ConnectionTable bucket={props.bucket} connections={connections} />
        )}
      </Section>
    </>
  );
}

const known = (value: number | undefined): string => (value === undefined ? "unknown" : whole(value));

const seconds = (value: number | undefined): string => (value === undefined ? "unknown" : `${value.toFixed(1)} s`);

function One(props: { landing: LandingNumbers; lags: { time_ms: number[]; lag: number[] } | undefined }) {
  const { url, error, heard_ms, numbers, page } = props.landing;
  if (!numbers) {
    return (
      <Empty title="The landing does not answer">
        <p>
          <code>{url}</code>: {error ?? "it has not answered yet"}
        </p>
      </Empty>
    );
  }
  const lag = numbers.lag_seqnos;
  return (
    <>
      <p class="muted landing-url">
        {page ? <a href={page}>The landing’s own page</a> : url}
      </p>
      {error && (
        <p class="problem below" data-test="landing-gone">
          The landing has not answered since {heard_ms === null ? "an unknown time" : moment(heard_ms)} ({error}). What is
          shown is what it said last; <code>headwater ui DIR</code> shows its tables.
        </p>
      )}
      <dl class="tiles">
        <Tile label="Lag" value={lag === undefined ? "unknown" : short(lag)} note={`seqnos; ${seconds(numbers.lag_seconds)}`} />
        <Tile label="Documents are behind" value={seconds(numbers.documents_age_seconds)} />
        <Tile label="Documents" value={known(numbers.documents)} note={numbers.tables === undefined ? "in an unknown number of tables" : `in ${many(numbers.tables, "table")}`} />
        <Tile label="Rows landed" value={known(numbers.rows)} />
        <Tile label="Batches" value={known(numbers.batches)} note={`last took ${seconds(numbers.last_batch_seconds)}`} />
        <Tile label="Rollbacks undone" value={known(numbers.rollbacks)} />
      </dl>
      {props.lags && (
        <div class="charts">
          <Chart
            title="Lag since this page was opened"
            times={props.lags.time_ms}
            format={short}
            lines={[{ label: "seqnos", values: props.lags.lag, color: "--series-4" }]}
          />
        </div>
      )}
    </>
  );
}
