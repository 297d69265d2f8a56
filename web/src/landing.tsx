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
        {live.status !== "connecting" && live.landings.length === 0 && <NoneWatched bucket={props.bucket} />}
        {live.landings.map((landing) => (
          <One key={landing.url} landing={landing} lags={live.landing_lags.get(landing.url)} />
        ))}
      </Section>
      <Section
        id="pipeline-title"
        title="Its DCP connections"
        aside={<span class="muted">those with “spark” or “land” in their names</span>}
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

/** How to have this bucket landed and watched; the node may well watch landings of other buckets. */
function NoneWatched(props: { bucket: string }) {
  const { cluster, landings_watched } = useLive();
  const here = cluster.nodes.find((node) => node.this)?.name ?? "HOST";
  const port = 8080 + landings_watched;
  return (
    <Empty title={landings_watched === 0 ? "No landing is being watched" : `No landing of ${props.bucket} is being watched`}>
      {landings_watched > 0 && (
        <p>The node watches {many(landings_watched, "landing")}, of other buckets.</p>
      )}
      <p>Start a landing of this bucket with a page, and pass the address of its metrics to the node{landings_watched > 0 && ", in addition to the others"}:</p>
      <pre class="value">
        {`headwater land couchbase://${here}/${props.bucket} --into DIR --ui ${port}\nheadwater serve … --landing-metrics http://127.0.0.1:${port}/metrics`}
      </pre>
      <p>
        <code>headwater ui DIR</code> shows a lake that no landing writes to.
      </p>
    </Empty>
  );
}

const known = (value: number | undefined): string => (value === undefined ? "unknown" : whole(value));

const seconds = (value: number | undefined): string => (value === undefined ? "unknown" : `${value.toFixed(1)} s`);

/** The thresholds of the alerts in deploy/alerts.yml. */
const LATE_S = 300;
const DOCUMENTS_LATE_S = 900;
const lateTone = (behind_s: number | undefined, late_s: number): "warn" | undefined =>
  behind_s !== undefined && behind_s > late_s ? "warn" : undefined;

function One(props: { landing: LandingNumbers; lags: { time_ms: number[]; lag: number[] } | undefined }) {
  const { url, error, is_ended, heard_ms, numbers, page } = props.landing;
  if (!numbers) {
    return (
      <Empty title="A landing has not answered yet">
        <p>
          <code>{url}</code>: {error ?? "not asked yet"}. Its bucket is known once it answers.
        </p>
      </Empty>
    );
  }
  const since = heard_ms === null ? "an unknown time" : moment(heard_ms);
  const lag = numbers.lag_seqnos;
  return (
    <>
      <p class="muted landing-url">
        {page && !error ? <a href={page}>The landing’s own page</a> : url}
      </p>
      {error && (
        <p class="problem below" data-test="landing-gone">
          {is_ended
            ? `The landing was stopped at ${since}: nothing listens at its address. If you did not stop it, its log says why it ended.`
            : `The landing has been unreachable since ${since}: ${error}.`}{" "}
          The page shows its last answer; <code>headwater ui DIR</code> shows its tables.
        </p>
      )}
      {!error && numbers.active === 0 && (
        <p class="problem below" data-test="landing-gone">
          The landing is not running: {page ? "its own page" : "its log"} says why.
        </p>
      )}
      <dl class="tiles">
        <Tile label="Lag" value={lag === undefined ? "unknown" : short(lag)} note={`seqnos; ${seconds(numbers.lag_seconds)}`} tone={lateTone(numbers.lag_seconds, LATE_S)} />
        <Tile
          label="Documents are behind"
          value={seconds(numbers.documents_age_seconds)}
          tone={lateTone(numbers.documents_age_seconds, DOCUMENTS_LATE_S)}
          note={numbers.pending_changes === undefined ? undefined : `${many(numbers.pending_changes, "change")} to merge`}
        />
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
