import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { defineConfig, type Plugin } from "vite";

/** Writes into the page what it was built from, so that a test can tell whether the built files are those of today. */
function sourcesStamp(): Plugin {
  const hash = createHash("sha256");
  for (const name of readdirSync("src").sort()) hash.update(name).update(readFileSync(join("src", name)));
  hash.update(readFileSync("package-lock.json"));
  const content = hash.digest("hex");
  return {
    name: "sources-stamp",
    transformIndexHtml: () => [{ tag: "meta", attrs: { name: "sources", content }, injectTo: "head" }],
  };
}

// The page is part of the Python package: users need no Node. All files lie in one folder, and their names have the
// hash of what is in them.
export default defineConfig({
  base: "/ui/assets/",
  plugins: [sourcesStamp()],
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: "../src/headwater/node/http/dashboard/assets",
    emptyOutDir: true,
    assetsDir: "",
    assetsInlineLimit: 0,
    modulePreload: false,
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"],
  },
});
