/** What the colours and shades of the maps stand for, with how many vbuckets there are of each. */

import { short, whole } from "./format";
import { STATES, stateName } from "./live";
import { isHeldBack, type NodeMap } from "./node-maps";
import { StateMark } from "./pieces";
import { isUnknown, type Range, type Shade, SHADES } from "./vbucket-map";

const UNITS: Record<Shade, string> = { documents: "documents", lag: "seqnos behind", seqno: "as seqno", none: "" };

export function MapLegend(props: { maps: NodeMap[]; shade: Shade; range: Range }) {
  const { maps, shade, range } = props;
  const counts = new Map<string, number>();
  const add = (name: string): void => void counts.set(name, (counts.get(name) ?? 0) + 1);
  for (const map of maps) {
    for (const row of map.rows) {
      if (map.unheardSinceMs !== null) {
        // What it said last is shown, and is not counted among what there is.
        if (row.state !== 0) add("unreachable");
        continue;
      }
      add(stateName(row.state));
      if (isHeldBack(map, row)) add("held");
      if (map.knowsNumbers && isUnknown(row, shade)) add("unknown");
    }
  }
  return (
    <div class="legend">
      <ul class="legend-states" aria-label={maps.length > 1 ? "Vbuckets of all nodes, by state" : "Vbuckets, by state"}>
        {STATES.slice(1)
          .concat("absent")
          .map((state) => (
            <li key={state} data-count={counts.get(state) ?? 0} data-legend={state}>
              <StateMark state={state} /> <b>{whole(counts.get(state) ?? 0)}</b>
            </li>
          ))}
        {counts.has("unreachable") && (
          <li data-count={counts.get("unreachable")} data-legend="unreachable">
            <i class="segment" data-standing="unknown" /> on nodes that can’t be reached <b>{whole(counts.get("unreachable")!)}</b>
          </li>
        )}
        {counts.has("held") && (
          <li data-count={counts.get("held")} data-legend="held">
            <StateMark state="replica" isHeld name="held back" /> <b>{whole(counts.get("held")!)}</b>
          </li>
        )}
      </ul>
      {shade !== "none" && (
        <div class="legend-scale">
          <Scale range={range} unit={UNITS[shade]} />
          {counts.has("unknown") && (
            <span class="state-mark" data-legend="unknown">
              <i data-state="replica" data-unknown="true" />
              not known {whole(counts.get("unknown")!)}
            </span>
          )}
        </div>
      )}
    </div>
  );
}

function Scale(props: { range: Range; unit: string }) {
  const { least, most } = props.range;
  if (least === most) {
    return (
      <span>
        {short(most)} {props.unit} everywhere
      </span>
    );
  }
  return (
    <>
      <span>{short(least)}</span>
      <span class="scale" aria-hidden="true">
        {Array.from({ length: SHADES }, (_, step) => (
          <i key={step} data-state="active" data-shade={String(step)} />
        ))}
      </span>
      <span>
        {short(most)} {props.unit}
      </span>
    </>
  );
}
