/** The frame of the page: who is logged in, which bucket, which page. */

import { useCallback, useEffect, useState } from "preact/hooks";
import { getJson, post, type Session } from "./api";
import { Changes } from "./changes";
import { Documents } from "./documents";
import { History } from "./history";
import { Landing } from "./landing";
import { many, moment } from "./format";
import { follow, useLive } from "./live";
import { Login, Mark } from "./login";
import { Overview } from "./overview";
import { Empty, Problem, Prose, ThemeSwitch } from "./pieces";
import { Streams } from "./streams";

const PAGES = {
  overview: "Overview",
  streams: "Streams",
  changes: "Changes",
  documents: "Documents",
  history: "History",
  landing: "Landing",
} as const;
type Page = keyof typeof PAGES;

function place(): { page: Page; query: URLSearchParams } {
  const [name = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { page: name in PAGES ? (name as Page) : "overview", query: new URLSearchParams(query) };
}

/** Where the focus goes when what had it is gone. */
function focusMain(): void {
  // The line of health above it stays in sight.
  requestAnimationFrame(() => document.getElementById("main")?.focus({ preventScroll: true }));
}

export function App() {
  const [session, setSession] = useState<Session | null | undefined>(undefined);
  const [problem, setProblem] = useState<string | null>(null);

  const load = useCallback(async () => {
    try {
      const session = await getJson<Session>("session");
      setSession(session.user === null ? null : session);
      setProblem(null);
    } catch {
      setProblem("The node does not answer. Is it running?");
    }
  }, []);

  useEffect(() => void load(), [load]);

  if (problem) return <main class="login"><Problem error={problem} /></main>;
  if (session === undefined) return null;
  if (session === null) return <Login onLoggedIn={() => void load().then(focusMain)} />;
  return <Frame session={session} onLoggedOut={() => setSession(null)} />;
}

function Frame(props: { session: Session; onLoggedOut: () => void }) {
  const { session, onLoggedOut } = props;
  const [bucket, setBucket] = useState(session.buckets[0] ?? "");
  const [where, setWhere] = useState(place());

  useEffect(() => {
    const listener = (): void => setWhere(place());
    addEventListener("hashchange", listener);
    return () => removeEventListener("hashchange", listener);
  }, []);

  useEffect(() => {
    document.title = `${PAGES[where.page]} · Headwater`;
  }, [where.page]);

  useEffect(() => (bucket ? follow(bucket, onLoggedOut) : undefined), [bucket, onLoggedOut]);

  const logOut = async (): Promise<void> => {
    await post("logout");
    onLoggedOut();
  };

  return (
    <>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); focusMain(); }}>
        Skip to the content
      </a>
      <header class="top">
        <a class="brand" href="#/overview" aria-label="Headwater">
          <Mark /> <span>Headwater</span>
        </a>
        <nav aria-label="Pages">
          {Object.entries(PAGES).map(([name, title]) => (
            <a key={name} href={`#/${name}`} aria-current={where.page === name ? "page" : undefined}>
              {title}
            </a>
          ))}
        </nav>
        <div class="top-tools">
          <Status />
          {session.buckets.length > 1 ? (
            <label class="inline-field">
              <span class="tool-label">Bucket</span>
              <select id="bucket" value={bucket} onChange={(event) => setBucket(event.currentTarget.value)}>
                {session.buckets.map((name) => (
                  <option key={name}>{name}</option>
                ))}
              </select>
            </label>
          ) : (
            <span class="inline-field"><span class="tool-label bucket-label">Bucket</span> <b class="bucket-name">{bucket}</b></span>
          )}
          <ThemeSwitch />
          <button class="plain" onClick={() => void logOut()} title={`Logged in as ${session.user}`}>
            Log out
          </button>
        </div>
      </header>
      {bucket !== "" && <HealthLine />}
      <main id="main" tabIndex={-1}>
        <h1 class="sr">{PAGES[where.page]}</h1>
        {bucket === "" ? (
          <Empty title="You may not see any bucket">
            <p>You are logged in as {session.user}. Ask an admin for a role that reads a bucket.</p>
          </Empty>
        ) : (
          <Current page={where.page} bucket={bucket} query={where.query} />
        )}
      </main>
      <Footer />
    </>
  );
}

function Current(props: { page: Page; bucket: string; query: URLSearchParams }) {
  switch (props.page) {
    case "streams":
      return <Streams bucket={props.bucket} />;
    case "changes":
      return <Changes bucket={props.bucket} vbucket={props.query.get("vbucket") ?? ""} key={props.query.toString()} />;
    case "documents":
      return <Documents bucket={props.bucket} query={props.query} />;
    case "history":
      return <History bucket={props.bucket} />;
    case "landing":
      return <Landing bucket={props.bucket} />;
    default:
      return <Overview bucket={props.bucket} />;
  }
}

const LEVEL_NAMES = { ok: "Healthy", warn: "Attention", bad: "Problem" };

/** How the bucket is, in one line on every page, and what to do. The node decides; where it is silent, that is the line. */
function HealthLine() {
  const live = useLive();
  const [isOpen, setOpen] = useState(false);
  if (live.status === "lost") {
    return (
      <section class="health" data-level="bad" aria-label="Health">
        <p><b>This node has not answered since {live.heard_ms ? moment(live.heard_ms) : "this page was opened"}.</b> The page shows its last answer. Is it running?</p>
      </section>
    );
  }
  if (live.health === null) {
    // It takes its place from the beginning, so that nothing moves when the answer is there.
    return <section class="health" aria-label="Health"><p class="muted">Asking the node …</p></section>;
  }
  const { level, text, findings } = live.health;
  const more = findings.length - 1;
  return (
    <section class="health" data-level={level} aria-label="Health">
      <p role="status">
        <span class="sr">{LEVEL_NAMES[level]}: </span>
        <b>{text}</b>
        {findings[0] && <> <span class="health-do"><Prose text={findings[0].do} />.</span></>}
        {findings[0] && <> <a href={`#/${findings[0].page}`}>More</a></>}
      </p>
      {more > 0 && (
        <button class="disclose" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
          {many(more, "more finding")}
        </button>
      )}
      {isOpen && more > 0 && (
        <ul>
          {findings.slice(1).map((finding) => (
            <li key={finding.text} data-check={finding.check}>
              <b>{finding.text}</b> <span class="health-do"><Prose text={finding.do} />.</span>
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}

const STATUS_NAMES = { connecting: "connecting", live: "live", lost: "no answer" };

function Status() {
  const live = useLive();
  return (
    <span class={`status ${live.status}`} role="status">
      {STATUS_NAMES[live.status]}
    </span>
  );
}

function Footer() {
  const live = useLive();
  return (
    <footer>
      {live.version} · <a href="/metrics">metrics</a>
    </footer>
  );
}
