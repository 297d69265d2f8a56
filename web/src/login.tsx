/** The log-in. */

import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, post } from "./api";
import { Problem } from "./pieces";

export function Login(props: { onLoggedIn: () => void }) {
  const [error, setError] = useState<string | null>(null);
  const [isBusy, setBusy] = useState(false);
  const name = useRef<HTMLInputElement>(null);
  const password = useRef<HTMLInputElement>(null);

  useEffect(() => name.current?.focus(), []);

  const submit = async (event: Event): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await post("login", { user: name.current!.value, password: password.current!.value });
      props.onLoggedIn();
    } catch (thrown) {
      setError(thrown instanceof ApiError ? thrown.message : "The node does not answer");
      password.current!.select();
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
        <p class="muted">Log in as a user of this node. The node printed its first user when it was first started.</p>
        <div class="field">
          <label for="user">User</label>
          <input id="user" ref={name} name="user" autocomplete="username" required spellcheck={false} autocapitalize="none" />
        </div>
        <div class="field">
          <label for="password">Password</label>
          <input id="password" ref={password} name="password" type="password" autocomplete="current-password" required />
        </div>
        <Problem error={error} />
        <button type="submit" class="primary" disabled={isBusy}>
          {isBusy ? "Checking…" : "Log in"}
        </button>
      </form>
    </main>
  );
}

export function Mark() {
  return (
    <svg class="mark" viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="7" />
      <path d="M6 12c3.3-3 6.7-3 10 0s6.7 3 10 0M6 20c3.3-3 6.7-3 10 0s6.7 3 10 0" />
    </svg>
  );
}
