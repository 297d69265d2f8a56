/** The vbuckets of one node as a grid: the colour is the state, the shade a number of them. */

import { useEffect, useRef, useState } from "preact/hooks";
import { whole } from "./format";
import { stateName, type VBucketRow } from "./live";
import { isHeldBack, type NodeMap } from "./node-maps";

export type Shade = "documents" | "lag" | "seqno" | "none";
export const SHADES = 5;

interface Props {
  map: NodeMap;
  shade: Shade;
  range: Range;
  selected: number | null;
  onPoint: (vbucket: number | null) => void;
  onSelect: (vbucket: number) => void;
}

/** What the lightest and the darkest shade stand for. */
export interface Range {
  least: number;
  most: number;
}

/** The lag of a copy is not known where its active one does not answer. */
export const isUnknown = (row: VBucketRow, shade: Shade): boolean => shade === "lag" && row.state !== 0 && row.lag < 0;

export function rangeOf(rows: VBucketRow[], shade: Shade): Range {
  if (shade === "none") return { least: 0, most: 0 };
  const values = rows
    .filter((row) => row.state !== 0 && !isUnknown(row, shade))
    .map((row) => row[shade])
    .sort((one, other) => one - other);
  if (shade === "lag") return { least: 0, most: values.at(-1) ?? 0 };
  // The others differ little between vbuckets, and it is the difference that counts; a few that are far off
  // must not hide it.
  const aside = Math.floor(values.length / 50);
  const range = { least: values[aside] ?? 0, most: values[values.length - 1 - aside] ?? 0 };
  // Where nearly all are equal, the few that are not are what there is to see.
  return range.least === range.most ? { least: values[0] ?? 0, most: values.at(-1) ?? 0 } : range;
}

/** A lag of 1 among thousands must be seen, so its steps are not even. */
function shadeOf(value: number, range: Range, shade: Shade): number {
  if (range.most === range.least) return range.most === 0 ? 0 : SHADES - 1;
  if (shade === "lag") {
    if (value <= 0) return 0;
    return 1 + Math.min(SHADES - 2, Math.floor((Math.log(value) / Math.log(Math.max(2, range.most))) * (SHADES - 2) + 1e-9));
  }
  return Math.max(0, Math.min(SHADES - 1, Math.floor(((value - range.least) / (range.most - range.least)) * SHADES)));
}

/** Nothing is touched that is as it should be. */
function mark(cell: HTMLElement, name: string, value: string): void {
  if (cell.dataset[name] !== value) cell.dataset[name] = value;
}

function cellWords(vbucket: number, row: VBucketRow, known: { isHeld: boolean; knowsNumbers: boolean }): string {
  const state = stateName(row.state) + (known.isHeld ? ", held back" : "");
  if (!known.knowsNumbers) return `vbucket ${vbucket}, ${state}`;
  const lag = row.lag < 0 ? "not known" : whole(row.lag);
  return `vbucket ${vbucket}, ${state}, ${whole(row.documents)} documents, seqno ${whole(row.seqno)}, lag ${lag}`;
}

const columnsFor = (width: number, count: number): number => {
  if (count <= 16) return Math.max(4, Math.ceil(Math.sqrt(count)));
  if (count <= 128) return width < 560 ? 16 : 32;
  return width < 560 ? 32 : 64;
};

export function VBucketMap(props: Props) {
  const { map, shade, range, selected } = props;
  const { rows } = map;
  const id = `map-${map.node.name.replace(/\W/g, "-")}`;
  const grid = useRef<HTMLDivElement>(null);
  const cells = useRef<HTMLDivElement[]>([]);
  const [columns, setColumns] = useState(64);
  const [cursor, setCursor] = useState(0);
  const [hasFocus, setHasFocus] = useState(false);

  useEffect(() => {
    const element = grid.current!;
    const observer = new ResizeObserver(() => setColumns(columnsFor(element.clientWidth, rows.length)));
    observer.observe(element);
    return () => observer.disconnect();
  }, [rows.length]);

  // A thousand cells are made once, and then only what has changed is touched.
  useEffect(() => {
    const element = grid.current!;
    while (cells.current.length > rows.length) cells.current.pop()!.remove();
    while (cells.current.length < rows.length) {
      const cell = document.createElement("div");
      cell.className = "cell";
      cell.setAttribute("role", "option");
      cell.id = `${id}-${cells.current.length}`;
      cell.dataset.vbucket = String(cells.current.length);
      element.append(cell);
      cells.current.push(cell);
    }
    rows.forEach((row, vbucket) => {
      const cell = cells.current[vbucket]!;
      const state = stateName(row.state);
      const step = shade === "none" || !map.knowsNumbers ? SHADES - 1 : shadeOf(row[shade], range, shade);
      const isHeld = isHeldBack(map, row);
      mark(cell, "state", state);
      mark(cell, "shade", String(step));
      mark(cell, "unknown", String(map.knowsNumbers && isUnknown(row, shade)));
      mark(cell, "held", String(isHeld));
      const words = cellWords(vbucket, row, { isHeld, knowsNumbers: map.knowsNumbers });
      if (cell.ariaLabel !== words) cell.ariaLabel = words;
      const isSelected = String(vbucket === selected);
      if (cell.ariaSelected !== isSelected) cell.ariaSelected = isSelected;
      cell.classList.toggle("cursor", hasFocus && vbucket === cursor);
    });
  });

  const move = (event: KeyboardEvent): void => {
    const steps: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    let next = cursor;
    if (event.key in steps) next = cursor + steps[event.key]!;
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = rows.length - 1;
    else if (event.key === "Enter" || event.key === " ") props.onSelect(cursor);
    else return;
    event.preventDefault();
    if (next < 0 || next >= rows.length) return;
    setHasFocus(true);
    setCursor(next);
    props.onPoint(next);
  };

  const at = (event: Event): number | null => {
    const vbucket = (event.target as HTMLElement).dataset.vbucket;
    return vbucket === undefined ? null : Number(vbucket);
  };

  return (
    <div
      id={id}
      ref={grid}
      class="map"
      style={{ "--columns": columns }}
      role="listbox"
      tabIndex={0}
      aria-label={`Vbuckets of ${map.node.name}. Arrow keys move, Enter selects.`}
      aria-activedescendant={hasFocus ? `${id}-${cursor}` : undefined}
      onKeyDown={move}
      onFocus={(event) => {
        // A click gives the focus, too, and points at something by itself.
        if (!event.currentTarget.matches(":focus-visible")) return;
        setHasFocus(true);
        props.onPoint(cursor);
      }}
      onBlur={() => {
        setHasFocus(false);
        props.onPoint(null);
      }}
      onPointerOver={(event) => props.onPoint(at(event))}
      onPointerLeave={() => props.onPoint(null)}
      onClick={(event) => {
        const vbucket = at(event);
        if (vbucket === null) return;
        setCursor(vbucket);
        props.onPoint(vbucket);
        props.onSelect(vbucket);
      }}
    />
  );
}
