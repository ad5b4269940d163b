// The panel beside a conversation: system prompt, parameters, form of the output, tools.
import { el } from "./dom.js";
import { formFields, jsonValue, parameterValue, parametersOf } from "./protocol.js";

const FORMS = [
  ["", "any text", ""],
  ["json", "JSON schema", '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'],
  ["json_object", "any JSON object", ""],
  ["regex", "regular expression", "(yes|no), because [a-z ]+\\."],
  ["choice", "one of these lines", "yes\nno"],
  ["grammar", "Lark grammar", 'start: "answer: " /[0-9]+/'],
];
const EXAMPLE_TOOL = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Return the weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const USUAL = 8;
const KEPT = "octavo-settings";

/** Return a name that may be broken into lines behind each underscore. */
const breakable = (name) => name.split(/(?<=_)/).flatMap((part) => [part, el("wbr")]);

/** One input with its label, its help and the place of its error. `read` returns its value, or throws. */
class Field {
  constructor(name, label, input, help, read) {
    Object.assign(this, { name, input, read });
    input.id = `field-${name}`;
    input.setAttribute("aria-describedby", `about-${name}`);
    this.about = el("p", { id: `about-${name}`, class: "about" }, help);
    this.help = help;
    this.node = el("div", { class: `field${input.tagName === "TEXTAREA" ? " wide" : ""}` }, el("label", { for: input.id }, breakable(label)), input, this.about);
    input.addEventListener("input", () => this.fail(""));
  }
  fail(message) {
    this.input.toggleAttribute("aria-invalid", message !== "");
    if (message) this.input.setAttribute("aria-invalid", "true");
    this.about.textContent = message || this.help;
    this.about.classList.toggle("wrong", message !== "");
  }
}

function parameterField({ name, kind, help }) {
  const input =
    kind === "boolean"
      ? el("select", {}, el("option", { value: "" }, "default"), el("option", {}, "true"), el("option", {}, "false"))
      : ["strings", "object"].includes(kind)
        ? el("textarea", { rows: 1, spellcheck: "false", placeholder: kind === "strings" ? "one per line" : "JSON" })
        : el("input", { inputmode: kind === "number" ? "decimal" : "text", placeholder: "default", autocomplete: "off" });
  return new Field(name, name, input, help, () => ({ [name]: parameterValue(kind, input.value) }));
}

function formPanel() {
  const kind = el("select", { id: "form-kind", "aria-label": "Structured output" }, FORMS.map(([value, text]) => el("option", { value }, text)));
  const text = el("textarea", { rows: 6, spellcheck: "false", class: "code" });
  const help = "Checked when the request is sent. The output always matches it.";
  const field = new Field("form", "Definition", text, help, () => formFields(kind.value, text.value));
  const show = () => {
    const [, , example] = FORMS.find(([value]) => value === kind.value);
    field.node.hidden = example === "";
    if (FORMS.some((form) => form[2] === text.value) || !text.value) text.value = example;
    field.fail("");
  };
  kind.addEventListener("change", show);
  show();
  return { field, nodes: [el("div", { class: "field" }, el("span", {}, "Output"), kind), field.node] };
}

function toolPanel() {
  const text = el("textarea", { rows: 8, spellcheck: "false", class: "code", placeholder: "a JSON list of tools" });
  const choice = el("select", {}, ["auto", "required", "none"].map((each) => el("option", {}, each)));
  const read = () => {
    const tools = text.value.trim() ? jsonValue(text.value) : [];
    if (!Array.isArray(tools)) throw new Error("must be a list of tools: [ … ]");
    return tools.length ? { tools, tool_choice: choice.value } : {};
  };
  const field = new Field("tools", "Tools", text, "Calls appear in the conversation, where you enter their results.", read);
  const add = () => {
    try {
      text.value = JSON.stringify([...(text.value.trim() ? jsonValue(text.value) : []), EXAMPLE_TOOL], null, 1);
      text.dispatchEvent(new Event("input", { bubbles: true }));
    } catch (error) {
      field.fail(error.message);
    }
  };
  const example = el("button", { type: "button", class: "quiet", onclick: add }, "Add an example");
  const chosen = el("div", { class: "field" }, el("label", { for: "tool-choice" }, "tool_choice"), choice);
  choice.id = "tool-choice";
  return { field, nodes: [field.node, chosen, example] };
}

/** Keep over a reload of this tab what is written in a panel. */
function keepInputs(panel) {
  const kept = JSON.parse(sessionStorage.getItem(KEPT)) ?? {};
  for (const input of panel.querySelectorAll("input, select, textarea")) {
    if (!(input.id in kept)) continue;
    input.value = kept[input.id];
    input.dispatchEvent(new Event("change"));
    if (input.value) input.closest("details").open = true; // show parameters that are set
  }
  panel.addEventListener("input", ({ target }) => {
    kept[target.id] = target.value;
    sessionStorage.setItem(KEPT, JSON.stringify(kept));
  });
}

/** Fill the panel. Returns `read()`, the fields of a request or null, `system`, and `fail(error)`, which shows a
 * failure at its field and returns whether there is one. */
export function makeSettings(panel, schemas) {
  const system = el("textarea", { id: "system", rows: 3, "aria-label": "System prompt", placeholder: "none" });
  const parameters = parametersOf(schemas.ChatCompletionRequest).map(parameterField);
  const [form, tools] = [formPanel(), toolPanel()];
  const fields = [...parameters, form.field, tools.field];
  const chatOnly = [tools.field, ...parameters.filter((field) => !(field.name in schemas.CompletionRequest.properties))];
  const nodesOf = (some) => some.map((field) => field.node);
  const fold = (title, nodes, properties = {}) => el("details", properties, el("summary", {}, title), el("div", { class: "fields" }, nodes));
  const forChat = [fold("System prompt", [system], { open: true }), fold("Tools", tools.nodes)];
  panel.append(
    forChat[0],
    fold("Sampling", nodesOf(parameters.slice(0, USUAL)), { open: true }),
    fold("More parameters", nodesOf(parameters.slice(USUAL))),
    fold("Structured output", form.nodes),
    forChat[1],
  );
  keepInputs(panel);
  const showError = (field, message) => {
    field.fail(message);
    field.node.closest("details").open = true;
    panel.classList.add("open");
    field.input.focus();
  };
  let isChat = true;
  return {
    get system() {
      return isChat ? system.value : "";
    },
    setMode(mode) {
      isChat = mode === "chat";
      for (const node of [...forChat, ...nodesOf(chatOnly)]) node.hidden = !isChat;
    },
    read() {
      const values = {};
      for (const field of fields) {
        field.fail("");
        try {
          Object.assign(values, !isChat && chatOnly.includes(field) ? {} : field.read());
        } catch (error) {
          showError(field, error.message);
          return null;
        }
      }
      return JSON.parse(JSON.stringify(values));
    },
    fail({ field: name, message }) {
      const first = (name ?? "").split(/[.[]/)[0];
      const isForm = ["response_format", "structured_outputs"].includes(first);
      const field = isForm ? form.field : fields.find((each) => each.name === first);
      if (!field) return false;
      showError(field, message);
      return true;
    },
  };
}
