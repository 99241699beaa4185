// Incidents, each from the first page to its cure. An incident breaks something by the command line or by what
// it sends, and cures it in the console.

import { LONG_MS } from "./world.mjs";

export const RESERVE = "stock.reserve";

/** A message that reserves stock for an order. */
export const reservation = (id, order, { type = RESERVE, version = 1 } = {}) => ({
  id, event_type: type, key: order, headers: { version: String(version) },
  payload: { reservation_id: id, order_id: order, sku: "apple", quantity: 1 },
});

/** One key sends more than a limit lets through: the messages, and the partition that is behind. */
export async function hotKey(world) {
  const messages = 60;
  await world.limit("1");
  await world.send(...Array.from({ length: messages }, (_, n) => reservation(`h-${n + 1}`, "o-777", { version: n + 1 })));
  // The offsets of what came before are committed within seconds.
  let behind = [];
  await world.until(async () => {
    behind = (await world.lag()).partitions.filter((it) => it.records > 0);
    return behind.length === 1;
  });
  return { partition: behind[0].partition, messages };
}

/** Thousands of messages that nobody takes; each has an order of its own. */
export async function withoutRoute(world) {
  const count = 2_000;
  await world.send(...Array.from({ length: count }, (_, n) => reservation(`m-${n}`, `o-1${n}`, { type: "stock.many" })));
  await world.until(async () => (await world.count("parked")) === count, LONG_MS);
  return count;
}

/** From the first page to that of the consumer. */
async function toConsumer(visitor, world) {
  await visitor.open("/console");
  await visitor.follow(world.tenant);
  await visitor.follow("stock");
}

async function toMessage(visitor, world, id) {
  await toConsumer(visitor, world);
  await visitor.follow("All messages");
  await visitor.see(id);
  await visitor.follow(id);
}

/** Deploy the newest version of a handler that works. */
async function deploy(visitor, world, type) {
  await visitor.open("/console");
  await visitor.follow(world.tenant);
  await visitor.follow("Handlers");
  await visitor.follow("reservations");
  await visitor.see("ready");
  await visitor.submit("Deploy", { Consumer: "stock", "Event type; * for all others": type });
  await world.until(async () => (await world.deployed(type)) === "reservations");
}

/** Run again everything that is there for a reason. */
async function redriveAll(visitor, world, reason, messages) {
  const count = messages.toLocaleString("en");
  await toConsumer(visitor, world);
  await visitor.follow("All messages");
  await visitor.submit("Filter", { Reason: reason });
  await visitor.follow("Redrive…");
  await visitor.see(`${count} messages match at present`);
  await visitor.submit("Start the job", { "Why; kept": "the cause is mended" });
  await visitor.see("done", `${count} of ${count}`, "the cause is mended");
}

export const incidents = {
  async "a poison message: the live version traps"(visitor, world) {
    await world.breaks(RESERVE);
    await world.send(reservation("r-1", "o-1"));
    await world.until(async () => (await world.status("r-1")) === "failed_terminal");
    await toConsumer(visitor, world);
    await visitor.see("failed_terminal", "trap", "dead_letters: 1");
    await visitor.follow("Failures by their cause");
    await visitor.see("wasm trap: wasm");
    await visitor.follow("r-1");
    await visitor.see("It failed too often", "run 2");
    await visitor.open("/console");
    await visitor.follow(world.tenant);
    await visitor.follow("Handlers");
    await visitor.submit("Upload", { "Component, a .wasm file": world.file("reservations.wasm") });
    await deploy(visitor, world, RESERVE);
    await redriveAll(visitor, world, "trap", 1);
    await toMessage(visitor, world, "r-1");
    await visitor.see("completed", "Its effect is committed", "Result of the handler", '"status": "reserved"');
  },

  async "no route: nobody takes an event type"(visitor, world) {
    await world.send(reservation("r-2", "o-2", { type: "stock.preorder" }));
    await world.until(async () => (await world.status("r-2")) === "parked");
    await toMessage(visitor, world, "r-2");
    await visitor.see("No deployment takes its event type");
    await deploy(visitor, world, "stock.preorder");
    await redriveAll(visitor, world, "no_route", 1);
    await world.until(async () => (await world.status("r-2")) === "completed");
  },

  async "a bad version is live: back to the one before"(visitor, world) {
    await world.breaks(RESERVE);
    await world.send(reservation("r-3", "o-3"));
    await world.until(async () => (await world.status("r-3")) === "failed_terminal");
    await toConsumer(visitor, world);
    await visitor.see("broken");
    await visitor.follow(RESERVE);
    await visitor.submit("Roll back", { "Why; kept with the deployment": "it traps", "run again what it failed": true });
    await toMessage(visitor, world, "r-3");
    await visitor.see("completed", "failed, run 2");
  },

  async "a gap: an earlier version of the order never came"(visitor, world) {
    await world.send(reservation("r-4", "o-4", { version: 2 }));
    await world.until(async () => (await world.status("r-4")) === "parked");
    await toMessage(visitor, world, "r-4");
    await visitor.see("It goes on by itself when version 1");
    await visitor.submit("Run again", { "Why; kept": "version 1 is lost for good" });
    await visitor.see("done", "1 of 1");
    await world.until(async () => (await world.status("r-4")) === "completed");
  },

  async "a broken payload holds back its key"(visitor, world) {
    const broken = reservation("r-5", "o-5");
    broken.payload.order_id = "five";
    await world.send(broken);
    await world.until(async () => (await world.status("r-5")) === "parked");
    await world.send(reservation("r-6", "o-5", { version: 2 }));
    await world.until(async () => (await world.status("r-6")) === "waiting");
    await toMessage(visitor, world, "r-6");
    await visitor.see("waits behind r-5");
    await visitor.follow("r-5");
    await visitor.see("Its payload is not what its schema says");
    await visitor.follow("Edit the payload and run it again");
    // Over several lines, which a browser sends with other ends.
    const payload = JSON.stringify({ ...broken.payload, order_id: "o-5" }, null, 1);
    await visitor.submit("Show what changes", { Payload: payload });
    await visitor.see('- "order_id": "five"', '+ "order_id": "o-5"');
    await visitor.submit("Edit and run again", { "Why; kept": "the producer is mended" });
    const edits = (await world.json("audit", "--tenant", world.tenant)).filter((entry) => entry.action === "inbox.edit");
    if (edits[0]?.details.bytes !== payload.length) throw new Error(`other bytes than were shown: ${JSON.stringify(edits)}`);
    await visitor.see("completed");
    await world.until(async () => (await world.status("r-6")) === "completed");
  },

  async "a consumer that somebody paused"(visitor, world) {
    await world.oncebox("consumer", "pause", "stock", "--tenant", world.tenant);
    await world.send(reservation("r-7", "o-7"));
    await toConsumer(visitor, world);
    await visitor.see("paused");
    await visitor.submit("Resume");
    await visitor.see("running");
    await world.until(async () => (await world.status("r-7")) === "completed");
  },

  async "a suspended tenant"(visitor, world) {
    await world.oncebox("tenant", "suspend", world.tenant);
    await toConsumer(visitor, world);
    await visitor.see("The tenant is suspended; its consumers do not run.");
    await visitor.follow(world.tenant);
    await visitor.submit("Resume");
    await visitor.see("active");
    await world.send(reservation("r-8", "o-8"));
    await world.until(async () => (await world.status("r-8")) === "completed");
  },

  async "a limit that is too low"(visitor, world) {
    await world.limit("1");
    await visitor.open("/console");
    await visitor.see("at most 1");
    await visitor.follow(world.tenant);
    await visitor.follow("Limits");
    await visitor.submit("Set the limits", { "messages per second": "" });
    await visitor.follow(world.tenant);
    const { limits } = await world.json("tenant", "show", world.tenant);
    if (limits.messages_per_second !== null) throw new Error(JSON.stringify(limits));
  },

  async "the lag of one hot partition"(visitor, world) {
    const hot = await hotKey(world);
    await toConsumer(visitor, world);
    await visitor.follow("Lag by partition");
    await visitor.see("Not acked, on the brokers", `Lag ${world.tenant} ${hot.partition} `);
    await visitor.follow(world.tenant);
    await visitor.follow("Limits");
    await visitor.submit("Set the limits", { "messages per second": "" });
    await toConsumer(visitor, world);
    await visitor.follow("Lag by partition");
    await visitor.see("Not acked, on the brokers 0");
    const shown = await world.oncebox("consumer", "lag", "stock", "--tenant", world.tenant);
    if (!shown.includes("0 records are not acked, at ")) throw new Error(shown);
    await world.until(async () => (await world.statuses("h-")).filter((it) => it === "completed").length === hot.messages);
  },

  async "a canary that fails"(visitor, world) {
    await world.oncebox("canary", "start", "broken.wasm", "--tenant", world.tenant, "--consumer", "stock", "--event-type", RESERVE, "--percent", "50", "--wait");
    await toConsumer(visitor, world);
    await visitor.see("canary", "50 %");
    await visitor.open(await visitor.page.locator("tr", { hasText: "canary" }).getByRole("link").first().getAttribute("href"));
    await visitor.submit("Take away", { "Why; kept with the deployment": "it traps" });
    await visitor.see("ended", "it traps");
    await world.until(async () => (await world.canaries()).length === 0);
  },

  async "a collision: a known id with another payload"(visitor, world) {
    await world.send(reservation("r-10", "o-900"));
    await world.until(async () => (await world.status("r-10")) === "completed");
    const other = reservation("r-10", "o-900");
    other.payload.quantity = 2;
    await world.send(other);
    await world.until(async () => (await world.count("parked")) === 1);
    const [{ message_id: kept }] = await world.json("inbox", "list", "--tenant", world.tenant, "--status", "parked");
    await toConsumer(visitor, world);
    await visitor.follow("Failures by their cause");
    await visitor.see("collision");
    await visitor.follow(kept);
    await visitor.see("collision", kept);
    await visitor.submit("Discard", { "Why; kept": "the producer used an id twice" });
    await visitor.see("done", "1 of 1");
    await world.until(async () => (await world.count("parked")) === 0);
  },

  async "a version fails on everything, and its breaker is open"(visitor, world) {
    const count = 40;
    await world.breaks("stock.swap");
    await world.send(...Array.from({ length: count }, (_, n) => reservation(`b-${n}`, `o-2${n}`, { type: "stock.swap" })));
    await toConsumer(visitor, world);
    await visitor.see("breaker open", "wait: it fails on most of them");
    const shown = await world.oncebox("consumer", "show", "stock", "--tenant", world.tenant);
    if (!/the breaker of handler `broken`, version \w+, is (half )?open on host/.test(shown)) throw new Error(shown);
    await deploy(visitor, world, "stock.swap");
    const ended = async () => (await world.statuses("b-")).every((it) => ["completed", "failed_terminal"].includes(it));
    await world.until(ended);
    const failed = (await world.statuses("b-")).filter((it) => it === "failed_terminal").length;
    if (failed === count) throw new Error("the breaker held back none");
    // It may have opened before any of them had failed for good.
    if (failed > 0) await redriveAll(visitor, world, "trap", failed);
    await world.until(async () => (await world.statuses("b-")).every((it) => it === "completed"));
  },

  async "an endpoint that is down"(visitor, world) {
    await world.sells();
    world.provider.down.add(`/${world.tenant}`);
    const orders = Array.from({ length: 8 }, (_, n) => `down-${n}`);
    await world.order(...orders);
    await visitor.open("/console");
    await visitor.follow(world.tenant);
    await visitor.follow("Outgoing");
    await visitor.see("http:shop", "failed_retryable", "open on");
    world.provider.down.delete(`/${world.tenant}`);
    await visitor.submit("Test");
    await visitor.open(`/console/tenants/${world.tenant}/outgoing?destination=http:shop&status=failed_retryable`);
    await visitor.follow("Send now…");
    await visitor.submit("Start the job", { "Why; kept": "the shop is back" });
    await visitor.see("done", "the shop is back");
    await world.until(async () => orders.every((order) => world.provider.told.has(`${world.tenant}/${order}`)));
  },

  async "a reminder that is overdue"(visitor, world) {
    await world.overdue("late-1");
    await visitor.open("/console");
    await visitor.see("suspended");
    await visitor.follow(world.tenant);
    await visitor.follow("Outgoing");
    await visitor.see("inbox:sales", "Earliest due");
    await visitor.follow("Consumers");
    await visitor.submit("Resume");
    await visitor.see("active");
    await world.until(async () => (await world.outgoing("inbox:sales")).length === 0);
  },

  async "a tenant's own database is away"(visitor, world) {
    const own = `${world.tenant}-own`;
    await world.ownDatabase(own);
    await world.allow(own, false);
    await visitor.open("/console");
    await visitor.follow(own);
    await visitor.see("stock");
    await visitor.follow("stock");
    await visitor.see("does not answer, so that nothing of it runs");
    const shown = await world.oncebox("consumer", "show", "stock", "--tenant", own);
    if (!shown.includes("the database of its inbox does not answer")) throw new Error(shown);
    await world.allow(own, true);
    await visitor.see("Nothing is open");
    await world.reserve(own, "r-12");
  },

  async "retention is behind"(visitor, world) {
    await world.alone(async () => {
      const name = await world.oldPartition();
      await visitor.open("/console");
      await visitor.follow("Retention");
      await visitor.see(name, "due");
      await visitor.submit("Remove what is due");
      await world.until(async () => !(await world.partitions()).includes(name));
      await visitor.see("removed");
    });
  },

  async "a host is gone"(visitor, world) {
    const host = world.serve();
    try {
      await visitor.open("/console");
      await visitor.follow("Hosts");
      await visitor.see(`/${host.pid}`);
    } finally {
      host.kill("SIGKILL");
    }
    await visitor.miss(`/${host.pid}`);
    await world.send(reservation("r-11", "o-901"));
    await world.until(async () => (await world.status("r-11")) === "completed");
  },

  async "a token that somebody else has"(visitor, world) {
    await world.oncebox("token", "create", "mallory", "--role", "admin", "--tenant", world.tenant);
    await visitor.open("/console");
    await visitor.follow(world.tenant);
    await visitor.follow("Tokens");
    await visitor.see("mallory", "admin");
    await visitor.submit("Revoke");
    await visitor.see("revoked");
    const tokens = await world.json("token", "list", "--tenant", world.tenant);
    if (!tokens.every((token) => token.revoked_at)) throw new Error(JSON.stringify(tokens));
  },

  async "credentials that somebody saw"(visitor, world) {
    await visitor.open("/console");
    await visitor.follow(world.tenant);
    await visitor.submit("Rotate credentials");
    await world.send(reservation("r-9", "o-9"));
    await world.until(async () => (await world.status("r-9")) === "completed");
    await visitor.follow("Audit");
    await visitor.see("tenant.rotate_credentials");
  },

  async "messages without a route, by the thousand"(visitor, world) {
    const count = await withoutRoute(world);
    await deploy(visitor, world, "stock.many");
    await redriveAll(visitor, world, "no_route", count);
    if ((await world.completed()) < count) throw new Error("not all of them completed");
    const acts = (await world.json("audit", "--tenant", world.tenant, "--limit", "50")).filter((entry) => entry.details.messages === count);
    if (acts.length !== 1) throw new Error(`one entry says what the job did: ${JSON.stringify(acts)}`);
  },
};
