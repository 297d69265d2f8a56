/** One vbucket: its copies on all nodes, and its failover log. */

import { ofBucket, type VBucketDetails as Details } from "./api";
import { clock, whole } from "./format";
import { stateName, type VBucketRow } from "./live";
import { isHeldBack, type NodeMap } from "./node-maps";
import { Problem, StateMark, useAnswer } from "./pieces";

interface Props {
  bucket: string;
  maps: NodeMap[];
  pointed: number | null;
  selected: number | null;
  onClose: () => void;
}

export function VBucketDetails(props: Props) {
  const { maps, selected } = props;
  const shown = props.pointed ?? selected;
  const here = shown === null ? undefined : maps.find((map) => map.isThis)?.rows[shown];
  return (
    <aside class={`details card ${shown === null ? "" : "chosen"}`} aria-label="Vbucket">
      {shown === null || here === undefined ? (
        <>
          <h3>Vbucket</h3>
          <p class="muted">Point at a vbucket to see its numbers. Click it, or select it with the keyboard, to see its failover log.</p>
        </>
      ) : (
        <>
          <header>
            <h3>
              Vbucket <span data-test="vbucket">{shown}</span>
            </h3>
            {selected !== null && (
              <button class="plain" onClick={props.onClose}>
                Close
              </button>
            )}
          </header>
          {maps.length > 1 ? <Copies maps={maps} vbucket={shown} /> : <Numbers map={maps[0]!} row={here} />}
          {selected === shown && here.state !== 0 && <FailoverLog bucket={props.bucket} vbucket={shown} row={here} />}
        </>
      )}
    </aside>
  );
}

function Numbers(props: { map: NodeMap; row: VBucketRow }) {
  const { map, row } = props;
  return (
    <dl class="facts">
      <dt>state</dt>
      <dd>
        <StateMark state={stateName(row.state)} isHeld={isHeldBack(map, row)} />
      </dd>
      <dt>documents</dt>
      <dd>{whole(row.documents)}</dd>
      <dt>durable seqno</dt>
      <dd>{whole(row.seqno)}</dd>
      <dt>{stateName(row.state) === "active" ? "lag of streams" : "lag"}</dt>
      <dd>{lagText(row)}</dd>
    </dl>
  );
}

const lagText = (row: VBucketRow): string => (row.lag < 0 ? "not known" : whole(row.lag));

/** The copies that there are, the active one first. */
function Copies(props: { maps: NodeMap[]; vbucket: number }) {
  const copies = props.maps
    .map((map) => ({ map, row: map.rows[props.vbucket] }))
    .filter((copy): copy is { map: NodeMap; row: VBucketRow } => copy.row !== undefined && copy.row.state !== 0)
    .sort((one, other) => one.row.state - other.row.state);
  const documents = copies.find((copy) => copy.map.knowsNumbers)?.row.documents;
  if (copies.length === 0) return <p class="muted">No node has this vbucket.</p>;
  return (
    <>
      <dl class="facts">
        <dt>documents</dt>
        <dd>{documents === undefined ? "not known" : whole(documents)}</dd>
      </dl>
      <table class="copies">
        <thead>
          <tr>
            <th scope="col">Copy</th>
            <th scope="col" class="number">Seqno</th>
            <th scope="col" class="number">Lag</th>
          </tr>
        </thead>
        <tbody>
          {copies.map(({ map, row }) => (
            <tr key={map.node.name} data-copy={map.node.name}>
              <th scope="row">
                <StateMark state={stateName(row.state)} isHeld={isHeldBack(map, row)} />
                <span class="copy-node">
                  {map.node.name}
                  {map.isThis && ", here"}
                </span>
                {map.unheardSinceMs !== null && <span class="copy-node gone">as of {clock(map.unheardSinceMs)}</span>}
              </th>
              <td class="number">{map.knowsNumbers ? whole(row.seqno) : "–"}</td>
              <td class="number">{map.knowsNumbers && row.lag >= 0 ? whole(row.lag) : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

/** Asked for where a vbucket is chosen, and again when that vbucket has moved on. */
function FailoverLog(props: { bucket: string; vbucket: number; row: VBucketRow }) {
  const { vbucket, row } = props;
  const { answer, error } = useAnswer<Details>(ofBucket(props.bucket, `vbuckets/${vbucket}`), `${row.seqno}/${row.state}`);
  return (
    <>
      <Problem error={error} />
      {answer && answer.vbucket === vbucket && (
        <>
          <h4>Failover log</h4>
          <ol class="failover-log">
            {answer.failover_log.map((entry, index) => (
              <li key={entry.vbuuid}>
                <code>{entry.vbuuid}</code> from seqno {whole(entry.seqno)}
                {index === 0 && <span class="badge">now</span>}
              </li>
            ))}
          </ol>
        </>
      )}
    </>
  );
}
