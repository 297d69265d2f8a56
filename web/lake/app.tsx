/** The frame of a lake's page: the token if there is one, the line of health, and the three views. */

import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { ApiError, getJson, post } from "../src/api";
import { Mark } from "../src/login";
import { Empty, Problem, ThemeSwitch } from "../src/pieces";
import {
  at, type Heard, type Landing, Pipeline, type PipelineRow, type Session, type State, useAgain, useLakePath, useLinks,
} from "./lake";
import { Health, Overview } from "./overview";
import { isWell, Pipelines } from "./pipelines";
import { Tables } from "./tables";
import { Timeline } from "./timeline";

const PAGES = { overview: "Overview", timeline: "Timeline", tables: "Tables" } as const;
type Page = keyof typeof PAGES;

/** Where the address leads: a view, below the name of its pipeline if there are several. Null is their list. */
function place(pipelines: string[]): { pipeline: string | null; page: Page } {
  const parts = location.hash.replace(/^#\/?/, "").split("/");
  const name = parts.at(-1)!;
  const page = name in PAGES ? (name as Page) : "overview";
  if (pipelines.length === 0) return { pipeline: "", page };
  return { pipeline: pipelines.find((one) => encodeURIComponent(one) === parts[0]) ?? null, page };
}

function focusMain(): void {
  requestAnimationFrame(() => document.getElementById("main")?.focus());
}

export function App() {
  const [session, setSession] = useState<Session | null>(null);
  const [problem, setProblem] = useState<string | null>(null);

  const load = useCallback(async () => {
    try {
      setSession(await getJson<Session>("session"));
      setProblem(null);
    } catch {
      setProblem("The page's server does not answer. Is it running?");
    }
  }, []);
  useEffect(() => void load(), [load]);
  const logOut = useCallback(() => setSession((known) => known && { ...known, is_in: false }), []);

  if (problem) return <main class="login"><Problem error={problem} /></main>;
  if (session === null) return null;
  if (!session.is_in) return <TokenForm onGiven={() => void load().then(focusMain)} />;
  return <Frame session={session} onLoggedOut={logOut} />;
}

function TokenForm(props: { onGiven: () => void }) {
  const [error, setError] = useState<string | null>(null);
  const [isBusy, setBusy] = useState(false);
  const token = useRef<HTMLInputElement>(null);
  useEffect(() => token.current?.focus(), []);

  const submit = async (event: Event): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await post("login", { token: token.current!.value });
      props.onGiven();
    } catch (thrown) {
      setError(thrown instanceof ApiError ? thrown.message : "The page's server does not answer");
      token.current!.select();
    } finally {
      setBusy(false);
    }
  };

  return (
    <main class="login" id="main">
      <form class="card" onSubmit={(event) => void submit(event)}>
        <h1>
          <Mark /> Headwater
        </h1>
        <p class="muted">Enter the token that this page was started with (HEADWATER_UI_TOKEN).</p>
        <div class="field">
          <label for="token">Token</label>
          <input id="token" ref={token} name="token" type="password" autocomplete="current-password" required />
        </div>
        <Problem error={error} />
        <button type="submit" class="primary" disabled={isBusy}>
          {isBusy ? "Checking…" : "Show the lake"}
        </button>
      </form>
    </main>
  );
}

/** What the top of the page says: green is only for a landing that runs. */
interface Status {
  tone: "connecting" | "live" | "lost";
  text: string;
}

const LANDING_STATUS: Record<Landing["state"], (time: string) => Status> = {
  starting: () => ({ tone: "connecting", text: "starting" }),
  running: () => ({ tone: "live", text: "live" }),
  stopped: (time) => ({ tone: "connecting", text: `stopped at ${time}` }),
  failed: (time) => ({ tone: "lost", text: `failed at ${time}` }),
  silent: (time) => ({ tone: "lost", text: `no news since ${time}` }),
  unknown: () => ({ tone: "connecting", text: "no status file" }),
};

function statusOf(heard: Heard, landing: Landing | undefined): Status {
  if (heard.is === "lost") return { tone: "lost", text: `no answer since ${at(heard.at_ms)}` };
  if (heard.is === "connecting" || !landing) return { tone: "connecting", text: "connecting" };
  return LANDING_STATUS[landing.state](at(landing.time_s && landing.time_s * 1000));
}

function statusOfAll(heard: Heard, rows: PipelineRow[] | null): Status {
  if (heard.is !== "live" || rows === null) return statusOf(heard, undefined);
  const well = rows.filter(isWell).length;
  return well === rows.length ? { tone: "live", text: "live" } : { tone: "connecting", text: `${well} of ${rows.length} healthy` };
}

function Frame(props: { session: Session; onLoggedOut: () => void }) {
  const { session, onLoggedOut } = props;
  const { pipelines } = session;
  const [at, setAt] = useState(place(pipelines));

  useEffect(() => {
    const listener = (): void => setAt(place(pipelines));
    addEventListener("hashchange", listener);
    return () => removeEventListener("hashchange", listener);
  }, [pipelines]);

  if (at.pipeline === null) return <Index session={session} onLoggedOut={onLoggedOut} />;
  return (
    // What was known of one lake is not shown for another.
    <Pipeline.Provider value={at.pipeline} key={at.pipeline}>
      <OneLake session={session} page={at.page} pipeline={at.pipeline} onLoggedOut={onLoggedOut} />
    </Pipeline.Provider>
  );
}

function Index(props: { session: Session; onLoggedOut: () => void }) {
  const { state, heard } = useAgain<PipelineRow[]>("pipelines", props.onLoggedOut);
  return (
    <Shell title="Pipelines" {...props} status={statusOfAll(heard, state)} home="#/">
      {state && <Pipelines rows={state} heard={heard} />}
    </Shell>
  );
}

function OneLake(props: { session: Session; page: Page; pipeline: string; onLoggedOut: () => void }) {
  const { session, page, pipeline, onLoggedOut } = props;
  const { state, heard } = useAgain<State>(useLakePath()("state"), onLoggedOut);
  const link = useLinks();
  const nav = (
    <nav aria-label="Pages">
      {pipeline && <a href="#/">Pipelines</a>}
      {Object.entries(PAGES).map(([name, title]) => (
        <a key={name} href={link(name)} aria-current={page === name ? "page" : undefined}>
          {title}
        </a>
      ))}
    </nav>
  );
  return (
    <Shell
      title={PAGES[page]}
      of={pipeline}
      {...{ session, onLoggedOut, nav }}
      status={statusOf(heard, state?.landing)}
      home={link("overview")}
      nodePage={state?.landing.node_page}
      uri={state?.uri}
      looked_ms={state?.lake ? state.now_ms - state.lake.looked_ago_s * 1000 : null}
    >
      {state === null ? null : <Current page={page} state={state} heard={heard} />}
    </Shell>
  );
}

interface ShellParts {
  title: string;
  of?: string;
  session: Session;
  status: Status;
  home: string;
  nav?: ComponentChildren;
  nodePage?: string | null;
  uri?: string;
  /** When the tables were looked at; with many of them that is less often. */
  looked_ms?: number | null;
  onLoggedOut: () => void;
  children: ComponentChildren;
}

function Shell(props: ShellParts) {
  const { title, of, session, status, onLoggedOut } = props;
  useEffect(() => {
    document.title = [title, ...(of ? [of] : []), "Lake", "Headwater"].join(" · ");
  }, [title, of]);

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
        <a class="brand" href={props.home} aria-label={of ? `Headwater, ${of}, overview` : "Headwater, overview"}>
          <Mark /> <span>{of || "Headwater"}</span>
        </a>
        {props.nav}
        <div class="top-tools">
          <span class={`status ${status.tone}`} role="status">{status.text}</span>
          {props.nodePage && <a href={props.nodePage}>Node’s dashboard</a>}
          <ThemeSwitch />
          {session.needs_token && <button class="plain" onClick={() => void logOut()}>Log out</button>}
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        <h1 class="sr">{of ? `${of}: ${title}` : title}</h1>
        {props.children}
      </main>
      <footer>
        Headwater {session.version}
        {props.uri && <> · <span class="lake-uri">{props.uri}</span></>}
        {props.looked_ms && ` · tables as of ${at(props.looked_ms)}`}
      </footer>
    </>
  );
}

function Current(props: { page: Page; state: State; heard: Heard }) {
  const { page, state, heard } = props;
  const lake = state.lake;
  return (
    <>
      <Health state={state} heard={heard} />
      {lake === null ? (
        <Empty title="The tables can’t be read">
          <p>{state.problem ?? "They have not been read yet."}</p>
        </Empty>
      ) : page === "timeline" ? (
        <Timeline lake={lake} />
      ) : page === "tables" ? (
        <Tables lake={lake} />
      ) : (
        <Overview state={state} lake={lake} heard={heard} />
      )}
    </>
  );
}
