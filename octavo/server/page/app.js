// The frame of the page: views, colours, the key, the model.
import { askJson, keepKey, keyOf, onMissingKey } from "./api.js";
import { byId, el } from "./dom.js";
import { startEngine } from "./engine.js";
import { startPlayground } from "./playground.js";
import { makeSettings } from "./settings.js";

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  localStorage.setItem("octavo-theme", theme);
  document.documentElement.dataset.theme = theme;
  const names = { auto: "Auto", light: "Light", dark: "Dark" };
  byId("theme").textContent = names[theme];
  byId("theme").setAttribute("aria-label", `Colours: ${theme === "auto" ? "as in the system" : theme}`);
}

async function askForKey(failure) {
  const dialog = byId("key-dialog");
  const isWrong = failure && keyOf();
  byId("key-reason").textContent = !isWrong ? "" : failure.code === "invalid_api_key" ? "The server does not accept this key." : failure.message;
  byId("forget").hidden = !keyOf();
  byId("key").value = "";
  if (!dialog.open) dialog.showModal();
  dialog.returnValue = "";
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  const key = byId("key").value.trim();
  if (dialog.returnValue === "forget") keepKey("");
  else if (key) keepKey(key);
  byId("key-button").classList.toggle("set", keyOf() !== "");
  return key !== "" && dialog.returnValue !== "forget";
}

function showView(playground, settings, showEngine) {
  const view = ["chat", "completion", "engine"].find((name) => location.hash === `#${name}`) ?? "chat";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("playground").hidden = view === "engine";
  byId("settings-toggle").hidden = view === "engine";
  byId("engine").hidden = view !== "engine";
  showEngine(view === "engine");
  if (view !== "engine") {
    playground.setMode(view);
    settings.setMode(view);
  }
}

/** Show the choice of the model in the bar, or on a narrow screen, whose bar is full, in the settings. */
function placeModel() {
  const label = byId("model").parentNode;
  const narrow = matchMedia("(max-width: 600px)");
  const place = () => (narrow.matches ? byId("settings").prepend(label) : byId("settings-toggle").before(label));
  narrow.addEventListener("change", place);
  place();
}

async function start() {
  setTheme(localStorage.getItem("octavo-theme") ?? "auto");
  byId("theme").onclick = () =>
    setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
  byId("key-button").classList.toggle("set", keyOf() !== "");
  byId("key").onkeydown = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    byId("key-dialog").close("keep");
  };
  onMissingKey(askForKey);
  byId("settings-toggle").onclick = () => {
    const isOpen = byId("settings").classList.toggle("open");
    byId("settings-toggle").setAttribute("aria-expanded", isOpen);
  };
  byId("settings").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !byId("settings").classList.contains("open")) return;
    event.stopPropagation(); // Escape must not stop an answer here
    byId("settings-toggle").click();
    byId("settings-toggle").focus();
  });
  const { components } = await askJson("openapi.json");
  const settings = makeSettings(byId("settings"), components.schemas);
  placeModel();
  const playground = startPlayground(settings, () => byId("model").value);
  const showEngine = startEngine(byId("engine"));
  const show = () => showView(playground, settings, showEngine);
  addEventListener("hashchange", show);
  byId("key-button").onclick = async () => {
    await askForKey();
    show(); // requests that the previous key was refused
  };
  show();
  let models = null;
  while (models === null) {
    models = await askJson("v1/models").catch((error) => {
      byId("status").textContent = error.message; // while the model loads, or until there is a key
      return new Promise((resolve) => setTimeout(resolve, 3000, null));
    });
  }
  byId("status").textContent = "";
  byId("model").append(...models.data.map(({ id }) => el("option", { value: id }, id)));
  playground.allowImages(models.data.every((each) => each.reads_images !== false));
  byId("model").hidden = false;
}

start().catch((error) => (byId("status").textContent = error.message));
