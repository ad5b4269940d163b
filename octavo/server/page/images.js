// Images of messages: dropped, pasted or chosen, kept as data: URLs; and where they stand in a prompt.
import { askJson } from "./api.js";
import { button, byId, el } from "./dom.js";

const MOST_BYTES = 20 << 20;

const urlOf = (file) =>
  new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });

/** Return images as elements; `remove(i)` makes each of them removable. */
export const pictures = (urls, remove) =>
  el(
    "div",
    { class: "pictures" },
    urls.map((url, i) => {
      const name = `image ${i + 1} of ${urls.length}`;
      return el("figure", {}, el("img", { src: url, alt: name }), remove && button("×", () => remove(i), { "aria-label": `Remove ${name}` }));
    }),
  );

/** Let images be dropped onto the conversation, pasted and chosen. `take()` returns those of the next message. */
export function startImages(say) {
  const [talk, chosen, shown] = [document.querySelector(".talk"), byId("image-file"), byId("pictures")];
  let urls = [];
  let isOn = false;

  function draw() {
    shown.hidden = !urls.length;
    shown.replaceChildren(pictures(urls, (i) => void (urls.splice(i, 1), draw())));
  }

  async function add(files) {
    const images = [...files].filter((file) => file.type.startsWith("image/"));
    const large = images.find((file) => file.size > MOST_BYTES);
    if (images.length < files.length) say("only images can be added", true);
    if (large) say(`${large.name} is larger than ${MOST_BYTES >> 20} MiB`, true);
    for (const file of images.filter((each) => each !== large)) urls.push(await urlOf(file));
    draw();
    if (images.length) byId("prompt").focus();
  }

  const hasFiles = (event) => isOn && event.dataTransfer?.types.includes("Files");
  talk.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    talk.classList.add("drops");
  });
  talk.addEventListener("dragleave", (event) => talk.contains(event.relatedTarget) || talk.classList.remove("drops"));
  talk.addEventListener("drop", (event) => {
    talk.classList.remove("drops");
    if (!hasFiles(event)) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
  byId("prompt").addEventListener("paste", (event) => {
    if (!isOn || !event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  byId("image-button").onclick = () => chosen.click();
  chosen.onchange = () => {
    add(chosen.files);
    chosen.value = "";
  };
  return {
    count: () => urls.length,
    take() {
      const taken = urls;
      urls = [];
      draw();
      return taken;
    },
    allow(isAllowed) {
      isOn = isAllowed;
      byId("image-button").hidden = !isOn;
      if (!isOn) this.take();
    },
  };
}

/** Return the tokens of the prompt that a chat becomes, and where its images stand. */
export const promptOf = ({ model, messages }) => askJson("tokenize", { body: { model, messages, return_token_strs: true } });

/** Return the tokens of a prompt as an element, in which one mark stands for the tokens of an image. */
export function promptView({ token_strs: texts, media = [] }) {
  const nodes = [];
  for (let i = 0; i < texts.length; ) {
    const image = media.find((each) => each.offset === i);
    const place = image && `${image.length} tokens, ${i} to ${i + image.length - 1} of the prompt`;
    nodes.push(image ? el("span", { class: "span", title: place }, `${image.kind}: ${image.length} tokens`) : el("span", { class: "token" }, texts[i]));
    i += image ? image.length : 1;
  }
  return el("div", { class: "tokens prompt", role: "group", "aria-label": "Tokens of the prompt" }, nodes);
}
