// A person at the console: by mouse, by keyboard alone, or in a browser without JavaScript.

import { PATIENCE_MS } from "./world.mjs";

/** Most presses of Tab until something has the focus. */
const TABS_MAX = 300;
/** How long a visitor waits until they look again, and one without scripts until they load the page again. */
const [LOOK_MS, RELOAD_MS] = [250, 2_000];

export class Visitor {
  constructor(page, { byKeys = false, hasScripts = true } = {}) {
    Object.assign(this, { page, byKeys, hasScripts, visited: new Set() });
    page.setDefaultTimeout(PATIENCE_MS);
  }

  async open(path) {
    await this.page.goto(path);
    this.visited.add(new URL(this.page.url()).pathname + new URL(this.page.url()).search);
  }

  /** Follow a link by its text. */
  async follow(name) {
    await this.#go(this.page.getByRole("link", { name, exact: true }).first());
  }

  /** Fill in the form of a button, and send it. */
  async submit(button, fields = {}) {
    const form = this.page.locator("form", { has: this.page.getByRole("button", { name: button, exact: true }) }).first();
    for (const [label, value] of Object.entries(fields)) {
      await this.#fill(form.getByLabel(label), value);
    }
    await this.#go(form.getByRole("button", { name: button, exact: true }));
  }

  async #fill(field, value) {
    const kind = await field.evaluate((it) => (it.tagName === "INPUT" ? it.type : it.tagName.toLowerCase()));
    if (kind === "file") {
      const [chooser] = await Promise.all([this.page.waitForEvent("filechooser"), this.#press(field, "Enter")]);
      return chooser.setFiles(value);
    }
    if (!this.byKeys) {
      if (kind === "select") return field.selectOption({ label: value });
      if (kind === "checkbox") return field.setChecked(value);
      return field.fill(value);
    }
    await this.#reach(field);
    if (kind === "checkbox") {
      if ((await field.isChecked()) !== value) await this.page.keyboard.press("Space");
    } else if (kind === "select") {
      await this.page.keyboard.type(value);
    } else {
      await this.page.keyboard.press("ControlOrMeta+a");
      await this.page.keyboard.press("Delete");
      await this.page.keyboard.insertText(value);
    }
  }

  /** Press Tab until something has the focus. */
  async #reach(target) {
    await target.waitFor();
    // As many presses as there are stops between them need no look.
    const stops = await target.evaluate((it) => {
      const all = [...document.querySelectorAll("a[href], button, input:not([type=hidden]), select, textarea, summary")];
      return Math.max(0, all.indexOf(it) - all.indexOf(document.activeElement) - 1);
    });
    for (let tabs = 0; tabs < Math.min(stops, TABS_MAX); tabs++) await this.page.keyboard.press("Tab");
    for (let tabs = 0; tabs < TABS_MAX; tabs++) {
      if (await target.evaluate((it) => it === document.activeElement)) return;
      await this.page.keyboard.press("Tab");
    }
    throw new Error(`the keyboard does not reach ${target}`);
  }

  async #press(target, key) {
    if (!this.byKeys) return target.click();
    await this.#reach(target);
    return this.page.keyboard.press(key);
  }

  /** Press a link or a button, and wait for the page that it leads to, which is no refusal. */
  async #go(target) {
    await Promise.all([this.page.waitForEvent("load"), this.#press(target, "Enter")]);
    const refusal = this.page.locator("h1 + .refusal, h1 + .command + .refusal:has(p)");
    if (await refusal.count()) throw new Error(`${this.page.url()}: ${await refusal.first().innerText()}`);
    this.visited.add(new URL(this.page.url()).pathname + new URL(this.page.url()).search);
  }

  /** Wait, and load the page again where no script follows what changes. */
  async #later() {
    await this.page.waitForTimeout(this.hasScripts ? LOOK_MS : RELOAD_MS);
    if (!this.hasScripts) await this.page.reload();
  }

  /** Wait until the page says something no more. */
  async miss(text) {
    const deadline = Date.now() + PATIENCE_MS;
    while ((await this.page.locator("main").innerText()).includes(text)) {
      if (Date.now() > deadline) throw new Error(`${this.page.url()} still says ${text}`);
      await this.#later();
    }
  }

  /** Wait until the page says something. With scripts it follows what changes; else it is loaded again. */
  async see(...texts) {
    const deadline = Date.now() + PATIENCE_MS;
    for (;;) {
      const shown = (await this.page.locator("main").innerText()).replace(/\s+/g, " ");
      const missing = texts.filter((text) => !shown.includes(text));
      if (missing.length === 0) return;
      if (Date.now() > deadline) throw new Error(`${this.page.url()} does not say ${missing}: ${shown}`);
      await this.#later();
    }
  }
}
