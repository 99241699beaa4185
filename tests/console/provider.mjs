// An identity provider, and people who sign in at it. Its pages take every password.

import { randomBytes } from "node:crypto";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { join } from "node:path";
import { Visitor } from "./visitor.mjs";

/** People, and their groups. */
const PEOPLE = { grace: ["staff", "acme-on-call"], mallory: ["staff"], ada: ["platform"] };

/** An OpenID provider for one client, whose pages are at an address of their own. */
export async function provideIdentities(redirect) {
  const require = createRequire(join(process.env.ONCEBOX_BROWSER_TOOLS, "package.json"));
  const { default: Provider } = await import(require.resolve("oidc-provider"));
  const secret = randomBytes(32).toString("hex");
  const server = createServer();
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients: [{ client_id: "oncebox", client_secret: secret, redirect_uris: [redirect] }],
    claims: { openid: ["sub"], profile: ["preferred_username", "groups"], email: ["email", "email_verified"] },
    conformIdTokenClaims: false,
    cookies: { keys: [secret] },
    findAccount: (_, name) => ({
      accountId: name,
      claims: () => ({ sub: name, preferred_username: name, groups: PEOPLE[name] ?? [] }),
    }),
    pkce: { required: () => true },
  });
  server.on("request", provider.callback());
  return { issuer, secret, end: () => server.close() };
}

/** Who signs in there, who may not, and what others try. */
export async function signInElsewhere(browser, { base, oncebox, watched, fail }) {
  const json = async (...words) => JSON.parse(await oncebox(...words, "--json"));
  const enter = async (name, next) => {
    const context = await browser.newContext({ baseURL: base });
    // The provider's pages ask for a font of another site.
    const page = await context.newPage();
    await page.goto(next);
    await page.getByRole("link", { name: "Sign in with 127.0.0.1" }).click();
    await page.getByPlaceholder("Enter any login").fill(name);
    await page.getByPlaceholder("and password").fill("any");
    await page.getByRole("button", { name: "Sign-in" }).click();
    const returned = page.waitForRequest(/login\/return/);
    await page.getByRole("button", { name: "Continue" }).click();
    return { context, page, visitor: new Visitor(page), returned: (await returned).url() };
  };

  // An operator of one tenant gets where the link led, with these rights and no others.
  const grace = await enter("grace", "/console/tenants/acme?from=a-link");
  await grace.page.waitForURL("**/console/tenants/acme?from=a-link");
  await grace.visitor.see("acme");
  await grace.visitor.open("/console/tokens");
  await grace.visitor.see("the token reaches tenant `acme` only");
  const made = async () => (await json("token", "list")).filter((token) => token.created_by === "oidc:127.0.0.1");
  const [token, ...others] = await made();
  const { name, role, tenant } = token;
  if (others.length || name !== "grace" || role !== "operator" || tenant !== "acme" || !token.expires_at) fail(JSON.stringify(token));
  const started = (await json("audit")).filter((entry) => entry.action === "session.start" && entry.actor === "grace");
  if (started.length !== 1) fail(`the audit log names who began a session: ${JSON.stringify(started)}`);
  const cookies = (await grace.context.cookies(`${base}/console`)).filter((it) => it.name.startsWith("oncebox"));
  if (cookies.length !== 1 || cookies[0].sameSite !== "Strict" || !cookies[0].httpOnly) fail(JSON.stringify(cookies));

  // Nobody else can use what the provider sent back, nor can she again.
  for (const context of [grace.context, await browser.newContext()]) {
    const page = watched(await context.newPage());
    await page.goto(grace.returned);
    await page.getByText("this is not the end of a sign-in of this browser").waitFor();
  }

  // One without a group that has rights is refused.
  const mallory = await enter("mallory", "/console");
  await mallory.visitor.see("no group of `mallory` has rights here");
  await mallory.visitor.open("/console/hosts");
  await mallory.visitor.see("Token");
  if ((await made()).length !== 1) fail(`tokens for nobody: ${JSON.stringify(await made())}`);

  // Codes that are not of the sign-in that a browser has begun, and one that the provider did not make.
  const begun = await browser.newContext({ baseURL: base });
  const page = await begun.newPage();
  await page.goto("/console/login");
  const sent = page.waitForRequest(/\/auth\?/);
  await page.getByRole("link", { name: "Sign in with 127.0.0.1" }).click();
  const state = new URL((await sent).url()).searchParams.get("state");
  await page.getByPlaceholder("Enter any login").waitFor();
  for (const foreign of [grace.returned, "/console/login/return?state=another&code=made-up"]) {
    await page.goto(foreign);
    await page.getByText("this is not the end of a sign-in of this browser").waitFor();
  }
  await page.goto(`/console/login/return?state=${state}&code=made-up`);
  await page.getByText("`127.0.0.1`: Server returned error response").waitFor();
  await begun.close();
  if ((await made()).length !== 1) fail(`tokens for nobody: ${JSON.stringify(await made())}`);

  // Nor one who has the name of a token that somebody made, as the audit log would not tell them apart.
  const ada = await enter("ada", "/console");
  await ada.visitor.see("`ada` is the name of a token or of a host");
  await ada.context.close();
  if ((await made()).length !== 1) fail(`tokens for nobody: ${JSON.stringify(await made())}`);

  // Who revokes the token ends the session.
  await oncebox("token", "revoke", `${token.token_id}`);
  await grace.visitor.open("/console/tenants/acme");
  await grace.page.waitForURL("**/console/login?*");
  console.log("people of a provider sign in");
  await Promise.all([grace.context.close(), mallory.context.close()]);
}
