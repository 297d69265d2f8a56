import { render } from "preact";
import { App } from "./app";
import "../src/styles.css";
import "./lake.css";
import { applyTheme, chosenTheme } from "../src/theme";

applyTheme(chosenTheme());
render(<App />, document.getElementById("app")!);
