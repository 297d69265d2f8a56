/** Numbers and times as people read them. */

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const DATE = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });
const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export const whole = (value: number): string => WHOLE.format(value);

/** At most five signs, for tiles and axes. */
export const short = (value: number): string => (Math.abs(value) < 10_000 ? WHOLE.format(value) : SHORT.format(value));

export function bytes(value: number): string {
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || Math.abs(value) >= 10 ? value.toFixed(0) : value.toFixed(1)} ${UNITS[unit]}`;
}

export function duration(seconds: number): string {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d ${Math.floor((seconds % 86_400) / 3600)} h`;
}

export const clock = (timeMs: number): string => CLOCK.format(timeMs);

/** The time of day, and the day where it is another. */
export function moment(timeMs: number): string {
  const isToday = new Date(timeMs).toDateString() === new Date().toDateString();
  return isToday ? clock(timeMs) : `${DAY.format(timeMs)} ${clock(timeMs)}`;
}

/** The day and the time of day. */
export const dated = (timeMs: number): string => `${DATE.format(timeMs)} ${clock(timeMs)}`;

/** Under writes whoever gets changes is always some behind; with more than this, it does not keep up. */
export const BEHIND_SEQNOS = 1000;
const FAR_BEHIND_SEQNOS = 100_000;

/** How a lag is coloured, of copies and consumers alike: orange where deploy/alerts.yml alerts on that of copies. */
export const lagTone = (seqnos: number): "" | "warn" | "bad" =>
  seqnos > FAR_BEHIND_SEQNOS ? "bad" : seqnos > BEHIND_SEQNOS ? "warn" : "";

export const many = (count: number, one: string, more = `${one}s`): string => `${whole(count)} ${count === 1 ? one : more}`;
