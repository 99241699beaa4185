// The same incidents as in the console, found and cured by commands alone.

import { RESERVE, hotKey, reservation, withoutRoute } from "./incidents.mjs";

const STOCK = ["--consumer", "stock"];

/** Run a command that says all of this. */
async function see(world, words, ...texts) {
  const said = (await world.oncebox(...words, "--tenant", world.tenant)).replace(/\s+/g, " ");
  const missing = texts.filter((text) => !said.includes(text));
  if (missing.length) throw new Error(`\`${words.join(" ")}\` does not say ${missing}: ${said}`);
}

const completed = (world, ...ids) =>
  world.until(async () => (await Promise.all(ids.map((id) => world.status(id)))).every((status) => status === "completed"));

async function deploy(world, type) {
  await see(world, ["deploy", "reservations.wasm", ...STOCK, "--event-type", type, "--wait"]);
}

/** Run again everything that is there for a reason. */
async function redrive(world, reason, count) {
  const words = ["inbox", "redrive", ...STOCK, "--reason", reason, "--because", "the cause is mended"];
  const messages = count === 1 ? "1 message" : `${count} messages`;
  await see(world, [...words, "--dry-run"], `would redrive ${messages}`);
  await see(world, words, `redriven ${messages}`);
}

export const typed = {
  async "a poison message: the live version traps"(world) {
    await world.breaks(RESERVE);
    await world.send(reservation("r-1", "o-1"));
    await world.until(async () => (await world.status("r-1")) === "failed_terminal");
    await see(world, ["inbox", "list", ...STOCK, "--status", "failed_terminal"], "r-1", "trap");
    await see(world, ["why", "r-1"], "wasm trap: wasm");
    await deploy(world, RESERVE);
    await redrive(world, "trap", 1);
    await completed(world, "r-1");
    await see(world, ["why", "r-1"], "completed");
  },

  async "no route: nobody takes an event type"(world) {
    await world.send(reservation("r-2", "o-2", { type: "stock.preorder" }));
    await world.until(async () => (await world.status("r-2")) === "parked");
    await see(world, ["why", "r-2"], "stock.preorder");
    await deploy(world, "stock.preorder");
    await redrive(world, "no_route", 1);
    await completed(world, "r-2");
  },

  async "a bad version is live: back to the one before"(world) {
    await world.breaks(RESERVE);
    await world.send(reservation("r-3", "o-3"));
    await world.until(async () => (await world.status("r-3")) === "failed_terminal");
    await see(world, ["deployments", ...STOCK], "broken");
    await see(world, ["rollback", ...STOCK, "--event-type", RESERVE, "--reason", "it traps", "--redrive", "--wait"]);
    await completed(world, "r-3");
  },

  async "a gap: an earlier version of the order never came"(world) {
    await world.send(reservation("r-4", "o-4", { version: 2 }));
    await world.until(async () => (await world.status("r-4")) === "parked");
    await see(world, ["why", "r-4"], "version 1");
    await see(world, ["inbox", "redrive", "r-4", ...STOCK, "--because", "version 1 is lost for good"]);
    await completed(world, "r-4");
  },

  async "a broken payload holds back its key"(world) {
    const broken = reservation("r-5", "o-5");
    broken.payload.order_id = "five";
    await world.send(broken);
    await world.until(async () => (await world.status("r-5")) === "parked");
    await world.send(reservation("r-6", "o-5", { version: 2 }));
    await world.until(async () => (await world.status("r-6")) === "waiting");
    await see(world, ["why", "r-6"], "r-5");
    await see(world, ["why", "r-5"], "/order_id");
    const payload = world.write("mended.json", JSON.stringify({ ...broken.payload, order_id: "o-5" }));
    await see(world, ["inbox", "edit", "r-5", ...STOCK, "--payload", payload, "--because", "the producer is mended"]);
    await completed(world, "r-5", "r-6");
  },

  async "a consumer that somebody paused"(world) {
    await world.oncebox("consumer", "pause", "stock", "--tenant", world.tenant);
    await world.send(reservation("r-7", "o-7"));
    await see(world, ["consumer", "list"], "paused");
    await see(world, ["consumer", "resume", "stock"], "is running");
    await completed(world, "r-7");
  },

  async "a suspended tenant"(world) {
    await world.oncebox("tenant", "suspend", world.tenant);
    const { state } = await world.json("tenant", "show", world.tenant);
    if (state !== "suspended") throw new Error(state);
    await world.oncebox("tenant", "resume", world.tenant);
    await world.send(reservation("r-8", "o-8"));
    await completed(world, "r-8");
  },

  async "a limit that is too low"(world) {
    await world.limit("1");
    const limits = async () => (await world.json("tenant", "show", world.tenant)).limits.messages_per_second;
    if ((await limits()) !== 1) throw new Error(`${await limits()}`);
    await world.limit("none");
    if ((await limits()) !== null) throw new Error(`${await limits()}`);
  },

  async "the lag of one hot partition"(world) {
    const hot = await hotKey(world);
    await see(world, ["consumer", "lag", "stock"], `LAG ${world.tenant} ${hot.partition} `);
    await world.limit("none");
    await world.until(async () => (await world.oncebox("consumer", "lag", "stock", "--tenant", world.tenant)).includes("\n0 records are not acked"));
  },

  async "a canary that fails"(world) {
    const canary = [...STOCK, "--event-type", RESERVE];
    await see(world, ["canary", "start", "broken.wasm", ...canary, "--percent", "50", "--wait"]);
    await see(world, ["canary", "list"], "broken", "50");
    await see(world, ["canary", "stop", ...canary, "--reason", "it traps"]);
    await world.until(async () => (await world.canaries()).length === 0);
  },

  async "a collision: a known id with another payload"(world) {
    await world.send(reservation("r-10", "o-900"));
    await completed(world, "r-10");
    const other = reservation("r-10", "o-900");
    other.payload.quantity = 2;
    await world.send(other);
    await world.until(async () => (await world.count("parked")) === 1);
    const [{ message_id: kept, reason }] = await world.json("inbox", "list", "--tenant", world.tenant, "--status", "parked");
    if (reason !== "collision") throw new Error(reason);
    await see(world, ["why", kept], "r-10");
    await see(world, ["inbox", "discard", kept, ...STOCK, "--because", "the producer used an id twice"]);
    await world.until(async () => (await world.count("parked")) === 0);
  },

  async "a version fails on everything, and its breaker is open"(world) {
    const count = 40;
    await world.breaks("stock.swap");
    await world.send(...Array.from({ length: count }, (_, n) => reservation(`b-${n}`, `o-2${n}`, { type: "stock.swap" })));
    await world.until(async () => (await world.oncebox("consumer", "show", "stock", "--tenant", world.tenant)).includes("the breaker of handler `broken`"));
    await deploy(world, "stock.swap");
    await world.until(async () => (await world.statuses("b-")).every((it) => ["completed", "failed_terminal"].includes(it)));
    const failed = (await world.statuses("b-")).filter((it) => it === "failed_terminal").length;
    // The breaker may have opened before any of them had failed for good.
    if (failed > 0) await redrive(world, "trap", failed);
    await world.until(async () => (await world.statuses("b-")).every((it) => it === "completed"));
  },

  async "an endpoint that is down"(world) {
    await world.sells();
    world.provider.down.add(`/${world.tenant}`);
    const orders = Array.from({ length: 8 }, (_, n) => `down-${n}`);
    await world.order(...orders);
    await world.until(async () => /\bopen\b/.test(await world.oncebox("outgoing", "stats", "--tenant", world.tenant)));
    world.provider.down.delete(`/${world.tenant}`);
    await see(world, ["endpoint", "test", "shop"], "200");
    await see(world, ["outgoing", "redrive", "--destination", "http:shop", "--because", "the shop is back"]);
    await world.until(async () => orders.every((order) => world.provider.told.has(`${world.tenant}/${order}`)));
  },

  async "a reminder that is overdue"(world) {
    await world.overdue("late-1");
    await see(world, ["outgoing", "list", "--destination", "inbox:sales"], "received");
    await world.oncebox("tenant", "resume", world.tenant);
    await world.until(async () => (await world.outgoing("inbox:sales")).length === 0);
  },

  async "a tenant's own database is away"(world) {
    const own = `${world.tenant}-own`;
    await world.ownDatabase(own);
    await world.allow(own, false);
    const shown = await world.oncebox("consumer", "show", "stock", "--tenant", own);
    if (!shown.includes("the database of its inbox does not answer")) throw new Error(shown);
    await world.allow(own, true);
    await world.reserve(own, "r-12");
  },

  async "retention is behind"(world) {
    await world.alone(async () => {
      const name = await world.oldPartition();
      const plan = await world.oncebox("retention", "plan");
      if (!plan.includes(name)) throw new Error(plan);
      await world.oncebox("retention", "run");
      if ((await world.partitions()).includes(name)) throw new Error(`${name} is still there`);
    });
  },

  async "a host is gone"(world) {
    const host = world.serve();
    const isListed = async () => (await world.oncebox("hosts")).includes(`/${host.pid}`);
    try {
      await world.until(isListed);
    } finally {
      host.kill("SIGKILL");
    }
    await world.until(async () => !(await isListed()));
    await world.send(reservation("r-11", "o-901"));
    await completed(world, "r-11");
  },

  async "a token that somebody else has"(world) {
    await world.oncebox("token", "create", "mallory", "--role", "admin", "--tenant", world.tenant);
    const tokens = () => world.json("token", "list", "--tenant", world.tenant);
    const [{ token_id: id }] = (await tokens()).filter((token) => token.name === "mallory");
    await see(world, ["token", "revoke", `${id}`]);
    if (!(await tokens()).every((token) => token.revoked_at)) throw new Error(JSON.stringify(await tokens()));
  },

  async "credentials that somebody saw"(world) {
    await world.oncebox("tenant", "rotate-credentials", world.tenant);
    await world.send(reservation("r-9", "o-9"));
    await completed(world, "r-9");
    await see(world, ["audit"], "tenant.rotate_credentials");
  },

  async "messages without a route, by the thousand"(world) {
    const count = await withoutRoute(world);
    await see(world, ["inbox", "stats", ...STOCK], "no_route", `${count}`);
    await deploy(world, "stock.many");
    await redrive(world, "no_route", count);
    if ((await world.completed()) < count) throw new Error("not all of them completed");
  },
};
