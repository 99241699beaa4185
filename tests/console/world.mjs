// What stands around a visitor: a tenant of its own, and what breaks and sees it by the command line.

import { execFile, spawn } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { promisify } from "node:util";
import { setTimeout as sleep } from "node:timers/promises";

/** How long what is awaited may take, on a machine that does other things as well. */
export const PATIENCE_MS = 300_000;
/** Pause between looks at much work. */
export const LONG_MS = 2_000;
/** Messages of a page of the API, at most. */
const PAGE = 1_000;

/** A tenant of its own for one visitor, and what breaks and sees it by the command line. */
export class World {
  constructor(tenant, { program, folder, base, database, brokers, provider, settings }) {
    const env = { ...process.env, ONCEBOX_CONFIG: settings };
    Object.assign(this, { tenant, program, folder, base, database, brokers, provider, env });
  }

  async begin() {
    const policy = readFileSync(this.file("stock.toml"), "utf8").replace('topics = ["orders"]', `topics = ["${this.tenant}"]`);
    writeFileSync(this.file(`${this.tenant}.toml`), policy);
    await this.oncebox("tenant", "create", this.tenant, "--schema", "stock.sql");
    await this.oncebox("consumer", "create", "stock", "--tenant", this.tenant, "--policy", `${this.tenant}.toml`);
  }

  file(name) {
    return join(this.folder, name);
  }

  /** Writes a file of this tenant, and returns its path. */
  write(name, text) {
    const path = this.file(`${this.tenant}-${name}`);
    writeFileSync(path, text);
    return path;
  }

  /** Makes a version live that fails on everything. */
  breaks(type) {
    return this.oncebox("deploy", "broken.wasm", "--tenant", this.tenant, "--consumer", "stock", "--event-type", type, "--wait");
  }

  /** Limits how many messages a second a host runs. */
  limit(perSecond) {
    return this.oncebox("tenant", "limits", this.tenant, "--messages-per-second", perSecond);
  }

  async oncebox(...words) {
    return (await promisify(execFile)(this.program, words, { cwd: this.folder, env: this.env, maxBuffer: 64 << 20 })).stdout;
  }

  async json(...words) {
    return JSON.parse(await this.oncebox(...words, "--json"));
  }

  send(...messages) {
    return this.#publish(this.tenant, messages);
  }

  async #publish(topic, messages) {
    const file = `${topic}.jsonl`;
    writeFileSync(this.file(file), messages.map((message) => JSON.stringify(message) + "\n").join(""));
    await this.oncebox("send", file, "--topic", topic);
  }

  /** Reads from the API, for what is looked at again and again: a command for each look would take a processor. */
  async #read(...path) {
    const query = typeof path.at(-1) === "object" ? `?${new URLSearchParams(path.pop())}` : "";
    const answer = await fetch(`${this.base}/v1/tenants/${path.map(encodeURIComponent).join("/")}${query}`);
    if (!answer.ok) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
    return answer.json();
  }

  #list(tenant = this.tenant, consumer = "stock", filter = {}) {
    return this.#read(tenant, "consumers", consumer, "inbox", { limit: PAGE, ...filter });
  }

  async status(id) {
    return (await this.#list()).find((message) => message.message_id === id)?.status;
  }

  /** The statuses of the messages whose ids begin so. */
  async statuses(start) {
    return (await this.#list()).filter((it) => it.message_id.startsWith(start)).map((it) => it.status);
  }

  /** How many messages are to be run, and how many are in a state in which they wait for a person. */
  async backlog(status) {
    const { pending, open } = await this.#read(this.tenant, "consumers", "stock", "backlog");
    return { pending, count: open.filter((it) => it.status === status).reduce((sum, it) => sum + it.messages, 0) };
  }

  async count(status) {
    return (await this.backlog(status)).count;
  }

  /** Waits until nothing is open any more, then counts the messages that completed. */
  async completed() {
    await this.until(async () => {
      const { pending, count } = await this.backlog("parked");
      return pending + count === 0;
    }, LONG_MS);
    let [completed, after] = [0, {}];
    for (;;) {
      const page = await this.#list(this.tenant, "stock", { status: "completed", ...after });
      completed += page.length;
      const last = page.at(-1);
      if (page.length < PAGE) return completed;
      after = { after: `${last.received_at},${last.message_id}` };
    }
  }

  /** The handler that takes an event type. */
  async deployed(type) {
    const live = await this.#read(this.tenant, "consumers", "stock", "deployments");
    return live.find((it) => it.event_type === type && it.role === "stable")?.handler;
  }

  /** What the group of the consumer has not acked. */
  lag() {
    return this.#read(this.tenant, "consumers", "stock", "lag");
  }

  async canaries() {
    const live = await this.#read(this.tenant, "consumers", "stock", "deployments");
    return live.filter((it) => it.role === "canary");
  }

  async until(holds, pause = 300) {
    const deadline = Date.now() + PATIENCE_MS;
    while (!(await holds())) {
      if (Date.now() > deadline) throw new Error(`${holds} does not come true: ${await this.oncebox("inbox", "list", "--tenant", this.tenant)}`);
      await sleep(pause);
    }
  }

  /** Another consumer, whose handler tells a shop of each order and reminds itself of it. */
  async sells() {
    const { tenant, provider } = this;
    const [topic, shop] = [`${tenant}-sales`, `127.0.0.1:${provider.port}`];
    writeFileSync(this.file(`${topic}.toml`), `topics = ["${topic}"]
ack = "after_commit"
identity = { id = [{ header = "message-id" }, { header = "ce_id" }], event_type = [{ header = "event-type" }, { header = "ce_type" }] }
`);
    await this.oncebox("tenant", "limits", tenant, "--destinations-allowed", "http:shop,inbox:sales", "--endpoint-hosts-allowed", shop);
    await this.oncebox("tenant", "schema", "apply", tenant, "sales.sql");
    await this.oncebox("endpoint", "set", "shop", "--tenant", tenant, "--url", `http://${shop}/${tenant}`, "--unsigned", "--receiver-deduplicates");
    await this.oncebox("consumer", "create", "sales", "--tenant", tenant, "--policy", `${topic}.toml`);
    await this.oncebox("deploy", "sales.wasm", "--tenant", tenant, "--consumer", "sales", "--event-type", "*", "--grant", "emit",
      "--set", "confirm_to=http:shop", "--set", "remind_to=inbox:sales", "--set", "remind_after_s=20", "--wait");
  }

  order(...orders) {
    return this.#publish(`${this.tenant}-sales`, orders.map((order) => ({
      id: order, event_type: "order.placed", key: order, payload: { order_id: order, amount: 1 },
    })));
  }

  /** The status of an order. */
  async sold(order) {
    return (await this.#list(this.tenant, "sales")).find((it) => it.message_id === order)?.status;
  }

  /** An order whose reminder is due while the tenant is suspended. */
  async overdue(order) {
    await this.order(order);
    await this.until(async () => (await this.sold(order)) === "completed");
    await this.oncebox("tenant", "suspend", this.tenant);
    await this.until(async () => (await this.outgoing("inbox:sales")).some((it) => it.due_at < new Date().toISOString()));
  }

  /** What is still to be sent to a destination. */
  async outgoing(destination) {
    const all = await this.#read(this.tenant, "outgoing", { destination, limit: 1000 });
    return all.filter((it) => !it.settled_at);
  }

  /** Runs a statement on the server of the host's database. */
  async sql(statement, database = "postgres") {
    const url = this.database.replace("/postgres?", `/${database}?`);
    return (await promisify(execFile)("psql", ["-XAtqc", statement, url])).stdout.trim();
  }

  /** A tenant with a database of its own, and a consumer that runs. */
  async ownDatabase(name) {
    await this.sql(`CREATE DATABASE "${name}"`);
    writeFileSync(this.file(`${name}.url`), this.database.replace("/postgres?", `/${name}?`), { mode: 0o600 });
    const policy = readFileSync(this.file("stock.toml"), "utf8").replace('topics = ["orders"]', `topics = ["${name}"]`);
    writeFileSync(this.file(`${name}.toml`), policy);
    await this.oncebox("tenant", "create", name, "--schema", "stock.sql", "--database-url-file", `${name}.url`);
    await this.oncebox("consumer", "create", "stock", "--tenant", name, "--policy", `${name}.toml`);
    await this.oncebox("deploy", "reservations.wasm", "--tenant", name, "--consumer", "stock", "--event-type", "*", "--wait");
  }

  /** A message to the consumer of such a tenant, which completes. */
  async reserve(tenant, id) {
    const payload = { reservation_id: id, order_id: "o-1", sku: "apple", quantity: 1 };
    await this.#publish(tenant, [{ id, event_type: "stock.reserve", key: "o-1", headers: { version: "1" }, payload }]);
    await this.until(async () => (await this.#list(tenant)).some((it) => it.status === "completed"));
  }

  /** Lets sessions into a database, or ends all and lets none in. */
  async allow(name, isAllowed) {
    await this.sql(`ALTER DATABASE "${name}" WITH ALLOW_CONNECTIONS ${isAllowed}`);
    if (!isAllowed) await this.sql(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '${name}'`);
  }

  /** A time partition that is past its retention. */
  oldPartition() {
    return this.sql(`DO $$ DECLARE at timestamptz; name text; BEGIN
      SELECT oncebox.bucket_at(1::smallint, now() - interval '90 days') INTO at;
      name := 'inbox_7d' || to_char(at AT TIME ZONE 'UTC', '_YYYYMMDDHH24MISS');
      EXECUTE format('CREATE TABLE oncebox.%I PARTITION OF oncebox.inbox_7d FOR VALUES FROM (%L) TO (%L)', name, at,
        at + (SELECT bucket FROM oncebox.retention_class WHERE retention_class = 1));
      EXECUTE format('ALTER TABLE oncebox.%I OWNER TO %I', name, (SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'oncebox.inbox'::regclass));
      END $$; SELECT max(c.relname) FROM pg_class c WHERE c.relkind = 'r' AND c.relname LIKE 'inbox_7d_2%' AND c.relname < 'inbox_7d_' || to_char(now() - interval '60 days', 'YYYYMMDD')`);
  }

  /** Names of all time partitions. */
  partitions() {
    return this.sql("SELECT string_agg(relname, ' ') FROM pg_class WHERE relname LIKE 'inbox%' AND relkind = 'r'");
  }

  /** Another host of the same set. */
  serve() {
    const env = {
      ...this.env, ONCEBOX_DATABASE_URL: this.database, ONCEBOX_KAFKA_BROKERS: this.brokers,
      ONCEBOX_KEYS_MASTER_KEY_FILE: this.file(".oncebox/dev/master.key"), ONCEBOX_API_LISTEN: "127.0.0.1:0", ONCEBOX_HTTP_LISTEN: "127.0.0.1:0",
    };
    return spawn(this.program, ["serve"], { cwd: this.folder, env, stdio: "ignore" });
  }

  /** What one visitor does while the others do nothing like it. */
  alone(work) {
    const done = World.#queue.then(work);
    World.#queue = done.catch(() => {});
    return done;
  }

  static #queue = Promise.resolve();
}

/** A shop that is told of orders over HTTP, once each, unless it is down. */
export async function provide() {
  const provider = { down: new Set(), told: new Set() };
  provider.server = createServer((request, answer) => {
    let body = "";
    request.on("data", (data) => (body += data));
    request.on("end", () => {
      if (provider.down.has(request.url)) return answer.writeHead(503).end();
      if (body) provider.told.add(`${request.url.slice(1)}/${JSON.parse(body).order_id}`);
      answer.writeHead(200).end();
    });
  });
  await new Promise((resolve) => provider.server.listen(0, "127.0.0.1", resolve));
  return Object.assign(provider, { port: provider.server.address().port });
}
