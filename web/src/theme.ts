/** Light or dark: what the system says, unless it was chosen here. */

export type Theme = "auto" | "light" | "dark";
const NAME = "headwater-theme";
const listeners = new Set<() => void>();

export function chosenTheme(): Theme {
  const kept = localStorage.getItem(NAME);
  return kept === "light" || kept === "dark" ? kept : "auto";
}

export function applyTheme(theme: Theme): void {
  if (theme === "auto") {
    localStorage.removeItem(NAME);
    delete document.documentElement.dataset.theme;
  } else {
    localStorage.setItem(NAME, theme);
    document.documentElement.dataset.theme = theme;
  }
  for (const listener of listeners) listener();
}

/** Called when colours have changed; returns what ends that. */
export function onThemeChange(listener: () => void): () => void {
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", listener);
  listeners.add(listener);
  return () => {
    media.removeEventListener("change", listener);
    listeners.delete(listener);
  };
}

/** A named colour as it is now, for what is drawn by a script; `alpha` makes it see-through. */
export function color(name: string, alpha = 1): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const [red, green, blue] = getComputedStyle(probe).color.match(/\d+/g) ?? ["0", "0", "0"];
  probe.remove();
  return `rgba(${red}, ${green}, ${blue}, ${alpha})`;
}
