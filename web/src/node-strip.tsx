/** The vbuckets of one node in a strip, in their order: the colour is the state, and copies that are behind stand out. */

import { useEffect, useRef } from "preact/hooks";
import { clock, many, whole } from "./format";
import { stateName } from "./live";
import { activeDocuments, furthestCopy, isCopy, type NodeMap } from "./node-maps";
import { color, onThemeChange } from "./theme";

const HEIGHT = 14;

/** Under writes a copy is always some changes behind; with more than this it does not keep up. */
const BEHIND_SEQNOS = 1000;

const isBehind = (map: NodeMap, vbucket: number): boolean => {
  const row = map.rows[vbucket]!;
  return isCopy(row) && (row.lag < 0 || row.lag > (map.isHeld ? 0 : BEHIND_SEQNOS));
};

export function NodeStrip(props: { map: NodeMap }) {
  const { map } = props;
  return (
    <div class="map-node" data-this={map.isThis} data-heard={map.unheardSinceMs === null}>
      <NodeHead map={map} />
      <Strip map={map} />
    </div>
  );
}

function Strip(props: { map: NodeMap }) {
  const { map } = props;
  const canvas = useRef<HTMLCanvasElement>(null);
  const states = map.rows.map((row, vbucket) => (isBehind(map, vbucket) ? "held" : stateName(row.state)));
  const drawn = states.join();

  useEffect(() => {
    const element = canvas.current!;
    const draw = (): void => drawStrip(element, states);
    draw();
    const observer = new ResizeObserver(draw);
    observer.observe(element);
    const endTheme = onThemeChange(draw);
    return () => {
      observer.disconnect();
      endTheme();
    };
  }, [drawn]);

  return <canvas ref={canvas} class="strip" height={HEIGHT} role="img" aria-label={stripWords(map)} />;
}

function drawStrip(canvas: HTMLCanvasElement, states: string[]): void {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale));
  canvas.height = HEIGHT * scale;
  const context = canvas.getContext("2d")!;
  const colors = new Map([...new Set(states)].map((state) => [state, color(state === "absent" ? "--cell" : `--${state}`)]));
  const width = canvas.width / states.length;
  states.forEach((state, vbucket) => {
    context.fillStyle = colors.get(state)!;
    const left = Math.floor(vbucket * width);
    context.fillRect(left, 0, Math.max(1, Math.ceil((vbucket + 1) * width) - left), canvas.height);
  });
}

function stripWords(map: NodeMap): string {
  const counts = new Map<string, number>();
  for (const row of map.rows) {
    const name = stateName(row.state);
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  const states = [...counts].map(([name, count]) => `${whole(count)} ${name}`).join(", ");
  return `Vbuckets of ${map.node.name}: ${states}`;
}

/** A node's name, how it is, and what it has. */
export function NodeHead(props: { map: NodeMap }) {
  const { map } = props;
  const behind = furthestCopy(map);
  const active = map.rows.filter((row) => stateName(row.state) === "active").length;
  const copies = map.rows.filter(isCopy).length;
  return (
    <div class="map-head">
      <h3>
        {map.node.name}
        {map.isThis && map.node.name !== "this node" && <span class="badge">this node</span>}
        {map.isHeld && <span class="badge held">copies held back</span>}
      </h3>
      {map.unheardSinceMs !== null ? (
        <span class="badge gone" title={map.error ?? undefined}>
          unreachable since {clock(map.unheardSinceMs)}
        </span>
      ) : (
        map.knowsNumbers && (
          <span class="muted">
            {many(activeDocuments(map), "document")} active, {whole(active)} active vbuckets
            {copies > 0 && `, ${many(copies, "copy", "copies")}`}
            {behind !== null && (behind === 0 ? " up to date" : ` up to ${whole(behind)} behind`)}
          </span>
        )
      )}
      {!map.isThis && map.node.url && (
        <a href={map.node.url} class="map-link">
          its dashboard
        </a>
      )}
    </div>
  );
}
