/** A table, which on a narrow screen becomes a list of its rows with a name before each value. */

import { type ComponentChildren, Fragment } from "preact";

export interface Column<T> {
  title: string;
  show: (row: T) => ComponentChildren;
  isNumber?: boolean;
  /** What the row is about; it comes first on a narrow screen. */
  isHead?: boolean;
  class?: string;
}

interface Props<T> {
  columns: Column<T>[];
  rows: T[];
  keyOf: (row: T) => string | number;
  /** Attributes of a row, for those who look for it. */
  marks?: (row: T) => Record<string, string>;
  /** What is shown below a row, over its whole width. */
  below?: (row: T) => ComponentChildren;
  class?: string;
}

export function Table<T>(props: Props<T>) {
  return (
    <div class="table-frame">
      <table class={`stacked ${props.class ?? ""}`}>
        <thead>
          <tr>
            {props.columns.map((column) => (
              <th key={column.title} scope="col" class={column.isNumber ? "number" : undefined}>
                {column.title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {props.rows.map((row) => {
            const below = props.below?.(row);
            return (
              <Fragment key={props.keyOf(row)}>
                <tr {...props.marks?.(row)}>
                  {props.columns.map((column) => (
                    <Cell key={column.title} column={column} row={row} />
                  ))}
                </tr>
                {below && (
                  <tr class="inner">
                    <td colSpan={props.columns.length}>{below}</td>
                  </tr>
                )}
              </Fragment>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function Cell<T>(props: { column: Column<T>; row: T }) {
  const { column, row } = props;
  const classes = [column.isNumber ? "number" : "", column.class ?? ""].join(" ").trim() || undefined;
  if (column.isHead) {
    return (
      <th scope="row" class={classes}>
        {column.show(row)}
      </th>
    );
  }
  return (
    <td class={classes} data-label={column.title}>
      {column.show(row)}
    </td>
  );
}
