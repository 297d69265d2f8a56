/** Some rows of a table. Wide ones are scrolled in their own frame. */

import { Empty, Problem, useAnswer } from "../src/pieces";
import { type Sample, useLakePath } from "./lake";

export function SampleOf(props: { path: string; label: string }) {
  const { answer: sample, error } = useAnswer<Sample>(useLakePath()(props.path), 0, "The page's server does not answer");
  if (error) return <Problem error={error} />;
  if (sample === null) return <p class="muted">Reading…</p>;
  if (sample.rows.length === 0) return <Empty title="No rows to show"><p>{sample.of}</p></Empty>;
  return (
    <div class="sample" tabIndex={0} role="region" aria-label={props.label}>
      <table>
        <caption>{props.label}: {sample.of}</caption>
        <thead>
          <tr>
            {sample.columns.map((column) => (
              <th key={column} scope="col">{column}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {sample.rows.map((row, number) => (
            <tr key={number}>
              {row.map((cell, column) => (
                <td key={column}>{cell === null ? <span class="muted">null</span> : cell}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
