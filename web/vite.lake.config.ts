import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { defineConfig, type Plugin } from "vite";

/** As the dashboard's: a test sees by it whether the built files are those of today. */
function sourcesStamp(): Plugin {
  const hash = createHash("sha256");
  for (const folder of ["src", "lake"]) {
    for (const name of readdirSync(folder).sort()) hash.update(name).update(readFileSync(join(folder, name)));
  }
  hash.update(readFileSync("package-lock.json"));
  const content = hash.digest("hex");
  return {
    name: "sources-stamp",
    transformIndexHtml: () => [{ tag: "meta", attrs: { name: "sources", content }, injectTo: "head" }],
  };
}

// The page of a lake: a second entry beside the dashboard, with files of its own, since `headwater ui` runs without a
// node. What both are made of lies in `src`.
export default defineConfig({
  root: "lake",
  base: "/ui/assets/",
  plugins: [sourcesStamp()],
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: "../../src/headwater/lake_page/assets",
    emptyOutDir: true,
    assetsDir: "",
    assetsInlineLimit: 0,
    modulePreload: false,
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"],
  },
});
