/** The tables: how large they are, which columns they have, and samples of their rows. */

import { useState } from "preact/hooks";
import { bytes, many, moment, whole } from "../src/format";
import { Empty, Section } from "../src/pieces";
import { type Column, Table } from "../src/table";
import type { Lake, LakeTable } from "./lake";
import { rejectsNote } from "./overview";
import { SampleOf } from "./sample";

const path = (table: LakeTable): string => (table.name ? `${table.kind}/${table.name}` : table.kind);

export function Tables(props: { lake: Lake }) {
  const [open, setOpen] = useState<string | null>(null);
  const note = rejectsNote(props.lake, 0);
  const rejectsTitle = note.charAt(0).toUpperCase() + note.slice(1);
  const rejects = props.lake.tables.filter((table) => table.kind === "rejects" && table.rows > 0);
  const columns: Column<LakeTable>[] = [
    {
      title: "Table",
      isHead: true,
      show: (table) => (
        <button
          class="disclose"
          aria-expanded={open === path(table)}
          onClick={() => setOpen(open === path(table) ? null : path(table))}
        >
          {path(table)}
        </button>
      ),
    },
    { title: "Rows", isNumber: true, show: (table) => whole(table.rows) },
    { title: "Size", isNumber: true, show: (table) => bytes(table.size_bytes) },
    { title: "Files", isNumber: true, show: (table) => whole(table.files) },
    { title: "Columns", show: (table) => `${whole(table.columns.length)}${table.typed ? `, ${table.typed}` : ""}` },
    { title: "Up to batch", isNumber: true, show: (table) => (table.batch < 0 ? "none" : whole(table.batch)) },
    { title: "Pending", isNumber: true, show: (table) => (table.kind !== "documents" ? "–" : table.pending === null ? "unknown" : whole(table.pending)) },
    { title: "Written", show: (table) => (table.changed_s === null ? "never" : moment(table.changed_s * 1000)) },
  ];
  return (
    <>
      <Section id="tables-title" title="Tables">
        <Table
          class="lake-tables"
          columns={columns}
          rows={props.lake.tables}
          keyOf={path}
          marks={(table) => ({ "data-table": path(table) })}
          below={(table) => (open === path(table) ? <Details table={table} /> : null)}
        />
        {props.lake.tables_more > 0 && <p class="muted">and {many(props.lake.tables_more, "table")} more</p>}
      </Section>
      <Section id="rejects-title" title="Rejects">
        {rejects.length === 0 ? (
          <Empty title={rejectsTitle}>
            <p>A value that a typed column can’t hold is null there. Its document is listed here, with the field and the reason.</p>
          </Empty>
        ) : (
          rejects.map((table) => (
            <div key={table.name} class="rejects" data-rejects={table.name}>
              <h3>
                {table.name} <span class="muted">{many(table.rows, "row")}</span>
              </h3>
              <SampleOf path={samplePath(table)} label={`Rejects of ${table.name}`} />
            </div>
          ))
        )}
      </Section>
    </>
  );
}

const samplePath = (table: LakeTable): string =>
  `sample?kind=${table.kind}&name=${encodeURIComponent(table.name)}&batch=${table.batch}`;

function Details(props: { table: LakeTable }) {
  return (
    <div class="table-details">
      <SampleOf path={samplePath(props.table)} label={`Sample of ${path(props.table)}`} />
      <h3>Columns</h3>
      <ul class="columns">
        {props.table.columns.map(([name, type]) => (
          <li key={name}>
            <code>{name}</code> <span class="muted">{type}</span>
          </li>
        ))}
      </ul>
    </div>
  );
}
