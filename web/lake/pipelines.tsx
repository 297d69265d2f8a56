/** The pipelines of a process that lands several: how each stands, and the way to its lake. */

import { many, whole } from "../src/format";
import { Problem, Section } from "../src/pieces";
import { type Heard, type PipelineRow, serverLost, span } from "./lake";

export const isWell = (row: PipelineRow): boolean => row.state === "running" && !row.failures;

function tone(row: PipelineRow): string {
  if (isWell(row)) return "mutation";
  return row.state === "failed" || row.state === "silent" ? "deletion" : "expiration";
}

function note(row: PipelineRow): string {
  if (row.failure) return row.failure;
  return row.failures ? `${many(row.failures, "failure")} in a row, retrying` : "";
}

export function Pipelines(props: { rows: PipelineRow[]; heard: Heard }) {
  const well = props.rows.filter(isWell).length;
  return (
    <Section
      id="pipelines-title"
      title="Pipelines"
      aside={<span class="muted">{`${whole(well)} of ${whole(props.rows.length)} run as they should`}</span>}
    >
      <Problem error={props.heard.is === "lost" ? serverLost(props.heard) : null} />
      <div class="sample pipelines" tabIndex={0} role="region" aria-label="Pipelines">
        <table>
          <thead>
            <tr>
              {["pipeline", "state", "lag", "documents are behind", "documents", "from", "into", "reason"].map((name) => (
                <th key={name} scope="col">{name}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {props.rows.map((row) => (
              <tr key={row.name} data-pipeline={row.name} data-state={row.state}>
                <th scope="row"><a href={`#/${encodeURIComponent(row.name)}/overview`}>{row.name}</a></th>
                <td><span class={`badge ${tone(row)}`}>{row.state}</span></td>
                <td>{span(row.lag_s)}</td>
                <td>{span(row.documents_age_s)}</td>
                <td>{row.documents === null || row.documents === undefined ? "unknown" : whole(row.documents)}</td>
                <td>{row.source ?? "unknown"}</td>
                <td>{row.uri}</td>
                <td>{note(row)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Section>
  );
}
