import { render } from "preact";
import { App } from "./app";
import "./styles.css";
import { applyTheme, chosenTheme } from "./theme";

applyTheme(chosenTheme());
render(<App />, document.getElementById("app")!);
