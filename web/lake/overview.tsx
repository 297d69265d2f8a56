/** How the landing stands: one sentence on top of every view, and the numbers below it. */

import { Chart } from "../src/chart";
import { bytes, many, moment, short, whole } from "../src/format";
import { Empty, Section, Tile } from "../src/pieces";
import { at, type BatchEvent, type Heard, type Lake, type LakeEvent, type Landing, serverLost, type State, span, useLinks } from "./lake";
import { EventList } from "./timeline";

const NEWEST = 8;

const noted = (landing: Landing): string => at(landing.time_s && landing.time_s * 1000);

type Tone = "ok" | "warn" | "bad";
const TONES: Tone[] = ["bad", "warn", "ok"];

/** What a person should know first, and what to do about it: the worst comes first. */
function health(state: State, heard: Heard): [Tone, string][] {
  const { landing, lake } = state;
  if (heard.is === "lost") return [["bad", serverLost(heard)]];
  const lines = [LANDINGS[landing.state](landing)];
  const failures = landing.state === "running" ? (landing.status?.failures ?? 0) : 0;
  if (failures > 0) {
    const why = landing.status?.failure ?? "its log says why";
    lines.push(["warn", `${many(failures, "failure")} in a row, and the landing retries: ${why}`]);
  }
  const aside = landing.status?.set_aside ?? [];
  for (const { name, reason, hint } of aside) {
    lines.push(["bad", `The table of ${name} is set aside, and lacks changes that the others have: ${reason}. ${hint}.`]);
  }
  const more = (landing.status?.tables_set_aside ?? 0) - aside.length;
  if (more > 0) lines.push(["bad", `${many(more, "more table")} ${more === 1 ? "is" : "are"} set aside: the log names them.`]);
  for (const said of [landing.status?.catalog_failure, landing.status?.advice]) {
    if (said) lines.push(["warn", `${said.charAt(0).toUpperCase()}${said.slice(1)}.`]);
  }
  if (state.problem) lines.push(["bad", `The tables can’t be read now: ${state.problem}`]);
  if (lake?.verdict && !lake.verdict.is_equal) {
    lines.push(["bad", `The last verify (${at(lake.verdict.time_s * 1000)}) found differences: ${lake.verdict.sentence}`]);
  }
  return lines.sort(([one], [other]) => TONES.indexOf(one) - TONES.indexOf(other));
}

const LANDINGS: Record<Landing["state"], (landing: Landing) => [Tone, string]> = {
  starting: () => ["warn", "The landing is starting: Spark takes some seconds."],
  running: (landing) =>
    landing.lag_s === null
      ? ["warn", "The landing is running. Its lag is unknown until it has landed everything once."]
      : [
          "ok",
          `The landing is running: changes has everything that was written more than ${span(landing.lag_s)} ago, documents everything older than ${span(landing.documents_age_s)}.`,
        ],
  stopped: (landing) => [
    "warn",
    `The landing was stopped at ${noted(landing)}. The same command resumes it.`,
  ],
  failed: (landing) => ["bad", `The landing failed at ${noted(landing)}: ${landing.failure ?? "unknown"}`],
  silent: (landing) => [
    "bad",
    `No sign of the landing since ${noted(landing)}: it was killed, or ${landing.host ?? "its machine"} can’t write here. The same command resumes it where the tables end.`,
  ],
  unknown: () => ["warn", "It is unknown whether a landing is running: there is no status file beside the tables."],
};

export function Health(props: { state: State; heard: Heard }) {
  return (
    <div class="healths" data-test="health" data-landing={props.state.landing.state}>
      {health(props.state, props.heard).map(([tone, line]) => (
        <p key={line} class={`health ${tone}`}>{line}</p>
      ))}
    </div>
  );
}

/** Changes that `documents` lack: those that wait to be merged, and those that are not landed yet. */
function waiting(state: State, lake: Lake): string {
  const { landing, now_ms } = state;
  const documents = lake.tables.filter((table) => table.kind === "documents");
  const looked = documents.map((table) => table.pending);
  const known = looked.includes(null) || lake.tables_more > 0 ? null : looked.reduce((sum: number, rows) => sum + (rows ?? 0), 0);
  const isRunning = landing.state === "running";
  const isNewer = isRunning && (landing.time_s ?? 0) > now_ms / 1000 - lake.looked_ago_s;
  const pending = (isNewer ? landing.status?.pending : undefined) ?? known;
  const unlanded = isRunning ? (landing.status?.lag_seqnos ?? null) : null;
  const merging = pending === null ? "pending unknown" : `${many(pending, "change")} pending`;
  if (unlanded) return pending === 0 ? `${many(unlanded, "seqno")} to land` : `${merging}, ${many(unlanded, "seqno")} to land`;
  if (pending !== 0) return merging;
  return unlanded === 0 ? "nothing pending" : "everything landed is merged";
}

export function Overview(props: { state: State; lake: Lake; heard: Heard }) {
  const { state, lake, heard } = props;
  const { landing, lags } = state;
  const link = useLinks();
  const pending = waiting(state, lake);
  const rejects = lake.tables.filter((table) => table.kind === "rejects").reduce((sum, table) => sum + table.rows, 0);
  const batches = lake.events.filter((event): event is BatchEvent => event.kind === "batch").reverse();
  const counted = batches.filter((batch) => batch.rows !== null);
  const last = batches.at(-1);
  const bound = "at most; the bucket was not asked";
  const seqnos = landing.status?.lag_seqnos ?? null;
  const lagNote = landing.is_bound ? bound : seqnos === null ? "seqnos unknown" : many(seqnos, "seqno");
  return (
    <>
      <Section id="now-title" title={heard.is === "lost" ? `As of ${at(heard.at_ms)}` : "Now"} aside={<Source landing={landing} lake={lake} />}>
        <dl class="tiles">
          <Tile label="Lag" value={span(landing.lag_s)} note={lagNote} tone={landing.lag_s === null ? "warn" : undefined} />
          <Tile label="Documents are behind" value={span(landing.documents_age_s)} note={landing.is_bound ? bound : pending} />
          <Tile label="Rows a second" value={rate(lake.rows_per_s)} note={`last minute; ${lastBatch(last)}`} />
          <Tile label="Documents" value={whole(lake.documents)} note={`in ${many(lake.collections, "table")}`} />
          <Tile label="Rows landed" value={lake.rows === null ? "unknown" : short(lake.rows)} note={many(lake.batch + 1, "batch", "batches")} />
          <Tile label="Rollbacks undone" value={lake.rollbacks === null ? "unknown" : whole(lake.rollbacks)} note="of vbuckets, since the beginning" />
          <Tile label="Files" value={size(landing.status?.live_bytes)} note={`${size(landing.status?.dead_bytes)} kept for earlier versions`} />
          <Tile label="Rejects" value={whole(rejects)} note={rejectsNote(lake, rejects)} tone={rejects ? "warn" : undefined} />
        </dl>
        <div class="charts">
          {lags.time_ms.length > 1 && (
            <Chart
              title="Behind the bucket, in seconds"
              times={lags.time_ms}
              format={(value) => `${short(value)} s`}
              lines={[
                { label: "documents", values: lags.age_s, color: "--series-4" },
                { label: "changes", values: lags.lag_s, color: "--series-1" },
              ]}
            />
          )}
          {counted.length > 1 && (
            <Chart
              title="Rows of each batch"
              times={counted.map((batch) => batch.time_s * 1000)}
              format={short}
              isBars
              lines={[{ label: "last batch", values: counted.map((batch) => batch.rows ?? 0), color: "--series-2" }]}
            />
          )}
        </div>
      </Section>
      <Verified lake={lake} />
      <Section id="newest-title" title="Latest events" aside={<a href={link("timeline")}>All events</a>}>
        <EventList events={newestEvents(lake)} />
      </Section>
    </>
  );
}

/** The newest, with the last rollback among them: batches and merges push it out in half a minute. */
function newestEvents(lake: Lake): LakeEvent[] {
  const newest = lake.events.slice(0, NEWEST);
  const rollback = lake.events.find((event) => event.kind === "rollback");
  return rollback && !newest.includes(rollback) ? [...newest.slice(0, -1), rollback] : newest;
}

function size(value: number | null | undefined): string {
  return value === null || value === undefined ? "unknown" : bytes(value);
}

function rate(rows_per_s: number | null): string {
  if (rows_per_s === null) return "unknown";
  return rows_per_s > 0 && rows_per_s < 10 ? rows_per_s.toFixed(1) : short(rows_per_s);
}

function lastBatch(last: BatchEvent | undefined): string {
  if (last === undefined) return "no batch yet";
  if (last.rows === null) return "last batch unknown";
  return `last batch ${many(last.rows, "row")}${last.took_s === null ? "" : ` in ${span(last.took_s)}`}`;
}

function Source(props: { landing: Landing; lake: Lake }) {
  const { landing, lake } = props;
  const every = landing.every_s === undefined ? "" : landing.every_s === null ? ", once" : `, every ${landing.every_s} s`;
  return (
    <span class="muted lake-uri">
      {landing.source ?? `bucket ${lake.bucket_uuid}`}{every}; {lake.selection}
      {landing.host && ` · on ${landing.host}`}
    </span>
  );
}

function Verified(props: { lake: Lake }) {
  const verdict = props.lake.verdict;
  return (
    <Section id="verify-title" title="Last verify">
      {verdict === null ? (
        <Empty title="No verify is known">
          <p>Compare the tables with the bucket. The verdict appears here:</p>
          <pre class="value">headwater verify URL DIR</pre>
        </Empty>
      ) : (
        <div class="card verdict" data-equal={String(verdict.is_equal)}>
          <p>
            <span class={`badge ${verdict.is_equal ? "mutation" : "deletion"}`}>{verdict.is_equal ? "equal" : "not equal"}</span>{" "}
            {verdict.sentence}
          </p>
          <p class="muted">
            {moment(verdict.time_s * 1000)}, of {verdict.compared}. Later changes were not checked.
          </p>
          {verdict.findings.length > 0 && (
            <ul class="findings">
              {verdict.findings.map((finding) => (
                <li key={finding}>{finding}</li>
              ))}
            </ul>
          )}
        </div>
      )}
    </Section>
  );
}

/** Rejects come of typed columns alone, and only the tables that are listed are counted. */
export function rejectsNote(lake: Lake, rejects: number): string {
  if (rejects > 0) return "values that don’t fit their column";
  if (!lake.tables.some((table) => table.kind === "documents" && table.typed !== "no typed columns")) return "there are no typed columns";
  return lake.tables_more > 0 ? "none in the listed tables" : "every value fits its column";
}
