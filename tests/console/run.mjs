// The console in Debian's Chromium, without windows, over a running host: every incident by mouse, by keyboard alone, without
// JavaScript, and by commands; every page that was seen on the way looked at by axe, in both themes, on a small screen and enlarged.
//
//   node run.mjs <oncebox> <folder of the sample> <folder for screenshots>

import { spawn } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { incidents } from "./incidents.mjs";
import { signIn } from "./sessions.mjs";
import { typed } from "./typed.mjs";
import { Visitor } from "./visitor.mjs";
import { PATIENCE_MS, World, provide } from "./world.mjs";

const [program, folder, shots] = process.argv.slice(2);
const require = createRequire(join(process.env.ONCEBOX_BROWSER_TOOLS, "package.json"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

// A browser started by root has no sandbox, and may have little shared memory; the others keep it from calling its maker.
const SWITCHES = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
];
const VIEWS = [
  { name: "dark", colorScheme: "dark", viewport: { width: 1280, height: 900 } },
  { name: "small", colorScheme: "light", viewport: { width: 320, height: 640 } },
  { name: "enlarged", colorScheme: "light", viewport: { width: 640, height: 450 }, deviceScaleFactor: 2 },
];

/** Every incident, by one kind of visitor. */
async function cure(browser, base, tenant, options, around) {
  const context = await browser.newContext({ baseURL: base, javaScriptEnabled: options.hasScripts ?? true });
  const visitor = new Visitor(watched(await context.newPage()), options);
  const cured = each(tenant, around, (name, world) => incidents[name](visitor, world));
  await cured.catch(async (error) => {
    await visitor.page.screenshot({ path: join(shots, `failed-${tenant}.png`), fullPage: true });
    throw error;
  });
  await context.close();
  return visitor.visited;
}

/** Every incident in turn, in the world of a tenant. */
async function each(tenant, around, meet) {
  const world = new World(tenant, around);
  await world.begin();
  for (const name of Object.keys(incidents)) {
    const began = Date.now();
    await meet(name, world).catch((error) => {
      throw new Error(`${tenant}: ${name}: ${error.stack}`);
    });
    console.log(`${tenant}: cured ${name} (${Date.now() - began} ms)`);
  }
}

/** A page whose errors end the run: a script that fails, or something that the policy of the pages refused. */
function watched(page) {
  page.setDefaultTimeout(PATIENCE_MS);
  page.on("pageerror", (error) => fail(`${page.url()}: ${error.stack}`));
  page.on("dialog", (dialog) => fail(`${page.url()}: ${dialog.message()}`));
  page.on("console", (message) => {
    if (message.type() === "error" && !/status of 4\d\d/.test(message.text())) fail(`${page.url()}: ${message.text()}`);
  });
  return page;
}

function fail(why) {
  console.error(why);
  process.exitCode = 1;
}

/** One page for each kind, of those that were visited. */
function kinds(visited) {
  const kind = (path) => path.replace(/[?].*/, (query) => "?" + query.slice(1).split("&").map((it) => it.split("=")[0]))
    .replace(/messages\/[^/?]+/, "messages/*").replace(/(jobs|deployments)\/\d+/, "$1/*");
  return [...new Map([...visited].map((path) => [kind(path), path])).values()];
}

async function look(browser, base, paths) {
  let looks = 0;
  for (const { name, ...view } of VIEWS) {
    const context = await browser.newContext({ baseURL: base, ...view });
    const page = watched(await context.newPage());
    for (const path of paths) {
      await page.goto(path);
      const file = `${name}${path.replace(/[^a-z0-9]+/gi, "-").slice(0, 80)}.png`;
      await page.screenshot({ path: join(shots, file), fullPage: true });
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => globalThis.axe.run());
      for (const { id, help, nodes } of violations) fail(`${name} ${path}: ${id}: ${help}: ${nodes[0].html}`);
      const isTooWide = await page.evaluate(() => document.documentElement.scrollWidth > document.documentElement.clientWidth);
      if (isTooWide) fail(`${name} ${path}: wider than the screen`);
      looks += 1;
    }
    await context.close();
  }
  console.log(`axe looked at ${looks} pages`);
}

/** The keys of the pages. */
async function keys(browser, base, tenant) {
  const context = await browser.newContext({ baseURL: base });
  const page = watched(await context.newPage());
  const at = (path) => page.waitForURL((url) => url.pathname === path, { timeout: PATIENCE_MS });
  await page.goto(`/console/tenants/${tenant}/consumers/stock/messages`);
  await page.keyboard.press("j");
  await page.keyboard.press("j");
  const row = await page.evaluate(() => [...document.querySelectorAll("tbody tr")].findIndex((it) => it.contains(document.activeElement)));
  if (row !== 1) fail(`j twice leads to row ${row}`);
  await page.keyboard.press("k");
  await Promise.all([page.waitForEvent("load"), page.keyboard.press("Enter")]);
  await page.keyboard.press("u");
  await at(`/console/tenants/${tenant}/consumers/stock/messages`);
  await page.keyboard.press("/");
  if (!(await page.evaluate(() => document.activeElement.name === "status"))) fail("/ does not lead to the filter");
  await page.keyboard.press("Escape");
  await page.keyboard.press("g");
  await page.keyboard.press("s");
  await at("/console/hosts");
  await page.keyboard.press("?");
  await page.getByRole("dialog", { name: "Keys" }).waitFor();
  await context.close();
  console.log("every key leads where it says");
}

let isOver = false;
mkdirSync(shots, { recursive: true });
const provider = await provide();
// What is sent over HTTP stays on this machine; retention waits for whoever asks for it.
const settings = join(folder, "settings.toml");
writeFileSync(settings, `[http_destinations]
hosts_allowed = ["127.0.0.1:${provider.port}"]
plain_http_hosts = ["127.0.0.1:${provider.port}"]
private_ranges_allowed = ["127.0.0.0/8"]
[retention]
enabled = false
`);
const host = spawn(program, ["dev"], {
  cwd: folder, env: { ...process.env, ONCEBOX_CONFIG: settings }, stdio: ["ignore", "pipe", "inherit"],
});
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium-headless-shell", args: SWITCHES });
try {
  let said = "";
  const base = await new Promise((resolve, reject) => {
    host.stdout.on("data", (data) => {
      said += data;
      const found = /^console +(http:\S+)\/console$/m.exec(said);
      if (found) resolve(found[1]);
    });
    host.on("exit", (code, signal) => {
      if (!isOver) fail(`the host ended by itself: ${code ?? signal}`);
      reject(new Error(`the host ended: ${said}`));
    });
  });
  const told = (name) => new RegExp(`^${name} +(\\S+)$`, "m").exec(said)[1];
  const [database, brokers] = [told("database"), told("brokers")];
  const around = { program, folder, base, database, brokers, provider, settings };
  const [visited] = await Promise.all([
    cure(browser, base, "mouse", {}, around),
    cure(browser, base, "keys", { byKeys: true }, around),
    cure(browser, base, "plain", { hasScripts: false }, around),
    each("typed", around, (name, world) => typed[name](world)),
  ]);
  const more = ["/console/hosts", "/console/doctor", "/console/retention", "/console/audit", "/console/tenants/mouse/outgoing",
    "/console/tenants/mouse/jobs", "/console/nowhere"];
  await look(browser, base, kinds([...visited, ...more]));
  await keys(browser, base, "mouse");
  await signIn(browser, { program, folder, database, brokers, watched, fail });
} finally {
  isOver = true;
  await browser.close();
  host.kill();
  provider.server.close();
}
