// Signing in and out, in two pages of one browser.

import { execFile, spawn } from "node:child_process";
import { randomBytes, randomInt } from "node:crypto";
import { once } from "node:events";
import { mkdirSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { join } from "node:path";
import { promisify } from "node:util";
import { setTimeout as sleep } from "node:timers/promises";
import { provideIdentities, signInElsewhere } from "./provider.mjs";
import { Visitor } from "./visitor.mjs";
import { PATIENCE_MS } from "./world.mjs";

/** Two ports that nobody listens on, outside the range that the system gives to connections. */
async function free() {
  const ports = new Set();
  while (ports.size < 2) {
    const port = randomInt(20_000, 32_768);
    const server = createServer().listen(port, "127.0.0.1");
    await once(server, "listening").then(() => ports.add(port), () => undefined);
    server.close();
  }
  return [...ports];
}

/** Wait until a host answers, or has ended. */
async function answered(url, host) {
  const deadline = Date.now() + PATIENCE_MS;
  while (!(await fetch(url).then((answer) => answer.ok, () => false))) {
    if (host.exitCode !== null) throw new Error(`the host ended: ${host.exitCode}`);
    if (Date.now() > deadline) throw new Error(`${url} does not answer`);
    await sleep(200);
  }
}

/** A host that asks for tokens, on a database of its own beside that of `dev`: signing in and out. */
export async function signIn(browser, { program, folder, database, brokers, watched, fail }) {
  const ports = await free();
  // Commands in the folder of `dev` would work on its database.
  const elsewhere = join(folder, "tokens");
  mkdirSync(elsewhere);
  const key = join(elsewhere, "master.key");
  writeFileSync(key, randomBytes(32).toString("hex"), { mode: 0o600 });
  const [listen, health] = ports.map((it) => `127.0.0.1:${it}`);
  const redirect = `http://${listen}/console/login/return`;
  const identities = await provideIdentities(redirect);
  const settings = join(elsewhere, "oncebox.toml");
  writeFileSync(settings, `[oidc]
issuer = "${identities.issuer}"
client_id = "oncebox"
redirect_url = "${redirect}"
grants = ["platform=admin", "acme-on-call=operator@acme", "acme=admin"]
`);
  const env = {
    ...process.env, ONCEBOX_DATABASE_URL: database.replace("/postgres?", "/tokens?"), ONCEBOX_KAFKA_BROKERS: brokers,
    ONCEBOX_KEYS_MASTER_KEY_FILE: key, ONCEBOX_API_LISTEN: listen, ONCEBOX_HTTP_LISTEN: health,
    ONCEBOX_CONFIG: settings, ONCEBOX_OIDC_CLIENT_SECRET: identities.secret,
  };
  const oncebox = async (...words) => (await promisify(execFile)(program, words, { cwd: elsewhere, env })).stdout;
  await oncebox("migrate");
  const [token] = (await oncebox("token", "create", "ada", "--role", "admin")).trim().split("\n");
  await oncebox("tenant", "create", "acme");
  const host = spawn(program, ["serve"], { cwd: elsewhere, env, stdio: ["ignore", "ignore", "inherit"] });
  const context = await browser.newContext({ baseURL: `http://${listen}` });
  try {
    await answered(`http://${listen}/console/login`, host);
    const page = watched(await context.newPage());
    await page.goto("/console/tenants/acme?from=a-link");
    const visitor = new Visitor(page);
    await page.getByLabel("Token").fill("obx_rubbish");
    await page.getByRole("button", { name: "Sign in" }).click();
    await visitor.see("the token is not known here");
    await page.getByLabel("Token").fill(token);
    await page.getByRole("button", { name: "Sign in" }).click();
    await page.waitForURL("**/console/tenants/acme?from=a-link");
    await visitor.submit("Suspend");
    await visitor.see("suspended");
    const [cookie] = await context.cookies();
    if (!cookie.httpOnly || cookie.sameSite !== "Strict") fail(JSON.stringify(cookie));
    // A link of another site leaves the cookie out, and leads there none the less.
    const other = watched(await context.newPage());
    await other.setContent(`<a href="http://${listen}/console/hosts">hosts</a>`);
    await other.getByRole("link").click();
    await other.getByRole("heading", { name: "Hosts" }).waitFor();
    // A form of another site has no effect.
    const foreign = watched(await context.newPage());
    await foreign.setContent(`<form method="post" action="http://${listen}/console/actions/tenant-resume">
      <input name="tenant" value="acme"><button>win</button></form>`);
    await foreign.getByRole("button").click();
    await foreign.getByText("the session is over").waitFor();
    // Signing out in one page ends the session of all.
    await visitor.open("/console/tenants/acme");
    await visitor.see("suspended");
    await other.goto("/console/hosts");
    await other.getByRole("button", { name: "Sign out" }).click();
    await other.waitForURL("**/console/login");
    await visitor.see("The session is over");
    console.log("a session begins and ends");
    await signInElsewhere(browser, { base: `http://${listen}`, oncebox, watched, fail });
  } finally {
    identities.end();
    await context.close();
    host.kill();
  }
}
