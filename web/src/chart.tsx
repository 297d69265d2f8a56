/** A chart of some series over time. What it shows last is also said in words. */

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { clock } from "./format";
import { color, onThemeChange } from "./theme";

export interface Line {
  label: string;
  values: number[];
  color: string;
}

interface Props {
  title: string;
  times: number[];
  lines: Line[];
  format: (value: number) => string;
  /** Each point is a thing of its own, such as a batch: there is nothing between two of them that a line could show. */
  isBars?: boolean;
}

const HEIGHT = 132;
const BAR_SHARE = 0.6;
const BAR_PX_MAX = 40;
const BAR_PX_MIN = 3;
/** Steps of the time axis: its labels have no parts of a second, and would repeat. */
const TIME_STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400, 604_800];

/** Room for half of the first and of the last bar. */
function barRange(_: unknown, least: number, most: number): [number, number] {
  const room = Math.max(1, (most - least) / 30);
  return [least - room, most + room];
}

function draw(parent: HTMLElement, props: Props): uPlot {
  const axis = { stroke: color("--muted"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false } };
  const paths = props.isBars ? uPlot.paths.bars!({ size: [BAR_SHARE, BAR_PX_MAX, BAR_PX_MIN] }) : undefined;
  return new uPlot(
    {
      width: parent.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, points: { size: 6 } },
      padding: [8, 28, 0, 0],
      scales: { x: { time: true, ...(props.isBars && { range: barRange }) }, y: { range: (_, __, max) => [0, Math.max(4, max * 1.1)] } },
      axes: [
        {
          ...axis, space: 80, size: 26, font: "11px system-ui", incrs: TIME_STEPS_S,
          values: (_, splits) => splits.map((at) => clock(at * 1000)),
        },
        { ...axis, space: 32, size: 56, font: "11px system-ui", values: (_, splits) => splits.map(props.format) },
      ],
      series: [
        {},
        ...props.lines.map((line, index) => ({
          label: line.label,
          stroke: color(line.color),
          width: props.isBars ? 0 : 1.75,
          paths,
          fill: props.isBars ? color(line.color) : index === 0 ? color(line.color, 0.12) : undefined,
          points: { show: false },
        })),
      ],
    },
    data(props),
    parent,
  );
}

const data = (props: Props): uPlot.AlignedData =>
  [props.times.map((time) => time / 1000), ...props.lines.map((line) => line.values.slice())] as uPlot.AlignedData;

export function Chart(props: Props) {
  const parent = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;

  useEffect(() => {
    const element = parent.current!;
    const redraw = (): void => {
      plot.current?.destroy();
      plot.current = draw(element, latest.current);
    };
    redraw();
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    const endTheme = onThemeChange(redraw);
    return () => {
      observer.disconnect();
      endTheme();
      plot.current?.destroy();
      plot.current = null;
    };
  }, []);

  useEffect(() => plot.current?.setData(data(props)));

  const last = props.lines.map((line) => `${line.label} ${props.format(line.values.at(-1) ?? 0)}`);
  return (
    <figure class="chart card">
      <figcaption>
        <span class="chart-title">{props.title}</span>
        <span class="chart-keys">
          {props.lines.map((line) => (
            <span key={line.label} class="chart-key">
              <i style={{ background: `var(${line.color})` }} />
              {line.label} <b>{props.format(line.values.at(-1) ?? 0)}</b>
            </span>
          ))}
        </span>
      </figcaption>
      <div ref={parent} class="chart-canvas" role="img" aria-label={`${props.title}: ${last.join(", ")}`} />
    </figure>
  );
}
